// What the CUDA driver is made of: checked calls, device arrays, fills and comparisons on the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/entry.h"

namespace mla::test {

inline void require(bool condition, const std::string& text) {
  if (condition) return;
  std::fprintf(stderr, "FAILED: %s\n", text.c_str());
  std::exit(1);
}

// Whether a list of numbers with commas between them has this one; an empty list has all.
inline bool is_listed(int number, const std::string& list) {
  return list.empty() || ("," + list + ",").find("," + std::to_string(number) + ",") != std::string::npos;
}

inline void check(cudaError_t status) {
  require(status == cudaSuccess, std::string("CUDA: ") + cudaGetErrorString(status));
}

inline void check(const Error& error) { require(error.empty(), error); }

inline const Device& device() {
  static const Device kDevice = [] {
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return Device{stream, 0};
  }();
  return kDevice;
}

inline void synchronize() { check(cudaStreamSynchronize(stream_of(device()))); }

// Memory comes from a pool that keeps what it once had: cases are many, and cudaMalloc is slow.
inline void* allocate(size_t bytes) {
  static const bool kKept = [] {
    cudaMemPool_t pool;
    uint64_t all = UINT64_MAX;
    check(cudaDeviceGetDefaultMemPool(&pool, device().ordinal));
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all));
    return true;
  }();
  void* data = nullptr;
  if (kKept) check(cudaMallocAsync(&data, bytes, stream_of(device())));
  return data;
}

// Device memory; new arrays hold bytes of 0xFF, which is NaN in every floating dtype and -1 as an integer.
template <class T>
class Array {
 public:
  Array() = default;
  explicit Array(size_t count) : data_(static_cast<T*>(allocate(count * sizeof(T) + 16))), count_(count) {
    poison();  // the 16 bytes: never a null pointer
  }
  explicit Array(const std::vector<T>& values) : Array(values.size()) { upload(values); }
  Array(Array&& other) noexcept { *this = std::move(other); }
  Array& operator=(Array&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~Array() {
    if (data_ != nullptr) cudaFreeAsync(data_, stream_of(device()));
  }

  T* data() const { return data_; }
  size_t size() const { return count_; }

  void poison() { check(cudaMemsetAsync(data_, 0xFF, count_ * sizeof(T), stream_of(device()))); }

  void upload(const std::vector<T>& values) {
    check(
        cudaMemcpyAsync(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice, stream_of(device())));
    synchronize();
  }

  std::vector<T> download() const {
    std::vector<T> values(count_);
    check(cudaMemcpyAsync(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost, stream_of(device())));
    synchronize();
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

inline LaunchShape grid_of(int64_t threads, size_t shared_bytes = 0) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>((threads + 255) / 256));
  shape.block = dim3(256);
  shape.shared_bytes = shared_bytes;
  return shape;
}

// --- Random numbers that depend on the position alone.

__host__ __device__ inline uint32_t mix(uint64_t x) {  // splitmix64's finaliser
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return static_cast<uint32_t>((x ^ x >> 31) >> 32);
}

// About normal, of mean 0 and variance 1: the sum of four uniform numbers.
__host__ __device__ inline float noise(uint64_t seed, uint64_t i) {
  float sum = 0;
  for (int k = 0; k < 4; ++k) sum += static_cast<float>(mix(seed * 0x100000001B3ull + i * 4 + k) >> 8) * 0x1p-24f;
  return (sum - 2.0f) * 1.7320508f;
}

template <class Element>
__global__ void fill_kernel(Element* values, int64_t count, uint64_t seed, float magnitude) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) values[i] = from_float<Element>(magnitude * noise(seed, i));
}

template <class Element>
void fill(Element* values, int64_t count, uint64_t seed, float magnitude = 1) {
  if (count > 0) check(launch("fill", fill_kernel<Element>, grid_of(count), device(), values, count, seed, magnitude));
}

// --- Bits.

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <class Element>
Element host_element(float x);
template <>
inline float host_element<float>(float x) {
  return x;
}
template <>
inline __nv_bfloat16 host_element<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
inline __half host_element<__half>(float x) {
  return __float2half_rn(x);
}

inline float host_float(float x) { return x; }
inline float host_float(__nv_bfloat16 x) { return __bfloat162float(x); }
inline float host_float(__half x) { return __half2float(x); }

// --- Dtypes.

template <class Element>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<Element, float>)
    return DType::kF32;
  else if constexpr (std::is_same_v<Element, __half>)
    return DType::kF16;
  else if constexpr (std::is_same_v<Element, E4M3FN>)
    return DType::kE4M3FN;
  else
    return DType::kBF16;
}

// f(Element{}) with the element type of a decode call's dtype.
template <class F>
void with_element(DType dtype, F f) {
  switch (dtype) {
    case DType::kBF16: return f(__nv_bfloat16{});
    case DType::kF16: return f(__half{});
    case DType::kE4M3FN: return f(E4M3FN{});
    default: require(false, std::string("the driver has no ") + name_of(dtype));
  }
}

inline int64_t size_of(DType dtype) {
  return dtype == DType::kF32 ? 4 : dtype == DType::kBF16 || dtype == DType::kF16 ? 2 : 1;
}

inline const char* short_name(DType dtype) {
  return dtype == DType::kBF16 ? "bf16" : dtype == DType::kF16 ? "f16" : dtype == DType::kE4M3FN ? "e4m3fn" : "f32";
}

inline DType dtype_named(const std::string& name) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3FN, DType::kE4M3FNUZ}) {
    if (name == name_of(dtype)) return dtype;
  }
  require(false, "no dtype is named " + name);
  return DType::kF32;
}

template <class Element>
constexpr double tolerance() {
  return std::is_same_v<Element, __half> ? 2e-3 : std::is_same_v<Element, float> ? 1e-5 : 1e-2;
}

using Random = std::mt19937;

inline int32_t pick(Random& random, int64_t low, int64_t high) {  // both included
  return static_cast<int32_t>(std::uniform_int_distribution<int64_t>(low, high)(random));
}

}  // namespace mla::test
