// What HIP's headers would give to device code, from the compiler's built-in functions alone: kernels build with any
// clang that knows the architecture, with or without ROCm. Waves have 64 lanes on both architectures.
//
//   __global__, __device__, __shared__, __launch_bounds__; threadIdx, blockIdx, blockDim, gridDim; __syncthreads
//   waves: lane_id, shuffles, ballots, reductions
//   elements: to_float, from_float of float, BF16, F16, E4M3FN, E4M3FNUZ; memory in 16-byte words
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
// The compiler may use as many registers as let a block of `threads` run.
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
// Registers are few enough for this many waves on each of a compute unit's four SIMDs.
#define MLA_WAVES_A_SIMD(waves) __attribute__((amdgpu_waves_per_eu(waves)))
// A kernel that the host finds by its name; its parameters are one struct of kernels/params.h, by value, and then
// numbers.
#define MLA_KERNEL extern "C" __global__ void

#include "kernels/e4m3.h"
#include "kernels/params.h"

// --- Places in the grid, under their usual names.
#define MLA_PLACE(axis, value)                          \
  __declspec(property(get = get_##axis)) unsigned axis; \
  static __device__ __forceinline__ unsigned get_##axis() { return value; }

struct MlaThreadIdx {
  MLA_PLACE(x, __builtin_amdgcn_workitem_id_x())
  MLA_PLACE(y, __builtin_amdgcn_workitem_id_y())
};
struct MlaBlockIdx {
  MLA_PLACE(x, __builtin_amdgcn_workgroup_id_x())
  MLA_PLACE(y, __builtin_amdgcn_workgroup_id_y())
  MLA_PLACE(z, __builtin_amdgcn_workgroup_id_z())
};
struct MlaBlockDim {
  MLA_PLACE(x, __builtin_amdgcn_workgroup_size_x())
  MLA_PLACE(y, __builtin_amdgcn_workgroup_size_y())
};
// In blocks: the first of the hidden arguments, which the runtime places behind a kernel's own.
struct MlaGridDim {
  static __device__ __forceinline__ unsigned hidden(int i) {
    return ((const __attribute__((address_space(4))) unsigned*)__builtin_amdgcn_implicitarg_ptr())[i];
  }
  MLA_PLACE(x, hidden(0))
  MLA_PLACE(y, hidden(1))
};
#undef MLA_PLACE

// Declared and never defined: only their properties are used.
extern const __device__ __attribute__((weak)) MlaThreadIdx threadIdx;
extern const __device__ __attribute__((weak)) MlaBlockIdx blockIdx;
extern const __device__ __attribute__((weak)) MlaBlockDim blockDim;
extern const __device__ __attribute__((weak)) MlaGridDim gridDim;

// All threads of the block; what they wrote to LDS and to memory before is seen by all after.
static __device__ __forceinline__ void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// <cmath>'s, which has no functions for devices.
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
static __device__ __forceinline__ float expf(float x) { return __builtin_elementwise_exp(x); }
static __device__ __forceinline__ float logf(float x) { return __builtin_elementwise_log(x); }
static __device__ __forceinline__ float fabsf(float x) { return __builtin_fabsf(x); }
static __device__ __forceinline__ float fmaxf(float a, float b) {
  return __builtin_fmaxf(a, b);
}  // of a number and NaN
static __device__ __forceinline__ float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static __device__ __forceinline__ bool isfinite(float x) { return __builtin_fabsf(x) < INFINITY; }

static __device__ __forceinline__ float __uint_as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
static __device__ __forceinline__ uint32_t __float_as_uint(float x) { return __builtin_bit_cast(uint32_t, x); }

// Atomics of whole numbers, relaxed, in LDS or memory; what was there before is returned.
static __device__ __forceinline__ int32_t atomicAdd(int32_t* address, int32_t value) {
  return __hip_atomic_fetch_add(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
static __device__ __forceinline__ int32_t atomicMin(int32_t* address, int32_t value) {
  return __hip_atomic_fetch_min(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
static __device__ __forceinline__ int32_t atomicMax(int32_t* address, int32_t value) {
  return __hip_atomic_fetch_max(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
static __device__ __forceinline__ int32_t atomicCAS(int32_t* address, int32_t expected, int32_t desired) {
  __hip_atomic_compare_exchange_strong(address, &expected, desired, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                       __HIP_MEMORY_SCOPE_AGENT);
  return expected;
}

namespace mla {

constexpr int kWave = 64;

#if defined(__gfx950__)
constexpr bool kGfx950 = true;  // else gfx942
#else
constexpr bool kGfx950 = false;
#endif

// --- Bits. Values go through a variable of their own: some releases of clang take __builtin_bit_cast of an element of
// a vector from memory for that of element 0.
template <class Target, class Source>
__device__ __forceinline__ Target bits_as(Source source) {
  static_assert(sizeof(Target) == sizeof(Source));
  Target target;
  __builtin_memcpy(&target, &source, sizeof(target));
  return target;
}

// --- Vectors as registers and memory hold them.
using U32x2 = uint32_t __attribute__((ext_vector_type(2)));
using U32x4 = uint32_t __attribute__((ext_vector_type(4)));
using I32x4 = int32_t __attribute__((ext_vector_type(4)));
using F32x2 = float __attribute__((ext_vector_type(2)));
using F32x4 = float __attribute__((ext_vector_type(4)));
using F32x16 = float __attribute__((ext_vector_type(16)));

__device__ __forceinline__ I32x4 i32x4(int32_t x, int32_t y, int32_t z, int32_t w) { return I32x4{x, y, z, w}; }

// kCount elements that are read or written in one access.
template <class Element, int kCount>
struct alignas(sizeof(Element) * kCount) Vector {
  Element at[kCount];
};

// An address that the compiler knows to be one of memory. Of one that has lain in LDS it does not, and an access that
// may go to either waits for both.
template <class T, class Address>
__device__ __forceinline__ auto in_memory(Address* address) {
  return (__attribute__((address_space(1))) T*)address;
}

// What no thread writes while the kernel runs.
template <class T>
__device__ __forceinline__ T read_only(const T* source) {
  return *in_memory<const T>(source);
}

// Bytes that nobody reads again soon do not displace others in the caches.
template <class Pointer>
__device__ __forceinline__ auto load_once(Pointer source) {
  return __builtin_nontemporal_load(source);
}

// --- Waves. All 64 lanes take part in shuffles and reductions.
__device__ __forceinline__ int lane_id() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0)); }

// What lane 0 of those that are active holds, in a scalar register.
__device__ __forceinline__ int32_t uniform(int32_t value) { return __builtin_amdgcn_readfirstlane(value); }

// The same number in a vector register: for numbers of all lanes, where scalar registers are too few for them.
__device__ __forceinline__ int32_t in_vector_register(int32_t value) {
  asm("" : "+v"(value));
  return value;
}

// The wave's number in its block, of one axis of threads.
__device__ __forceinline__ int wave_id() { return uniform(static_cast<int>(__builtin_amdgcn_workitem_id_x()) / kWave); }

template <class T>
__device__ __forceinline__ T shuffle(T value, int from_lane) {
  static_assert(sizeof(T) == 4);
  return bits_as<T>(__builtin_amdgcn_ds_bpermute(from_lane * 4, bits_as<int>(value)));
}
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
  return shuffle(value, lane_id() ^ mask);
}
// From `distance` lanes below; the lowest ones keep their own.
template <class T>
__device__ __forceinline__ T shuffle_up(T value, int distance) {
  const int lane = lane_id();
  return shuffle(value, lane < distance ? lane : lane - distance);
}

using LaneMask = uint64_t;
__device__ __forceinline__ LaneMask ballot(bool predicate) { return __builtin_amdgcn_ballot_w64(predicate); }
__device__ __forceinline__ int first_lane(LaneMask lanes) { return __builtin_ctzll(lanes); }
__device__ __forceinline__ bool any_lane(bool predicate) { return ballot(predicate) != 0; }

// Lanes exchange in the vector unit, without LDS: quad_perm, row_half_mirror and row_mirror of DPP.
enum Dpp : int { kDppXor1 = 0xB1, kDppXor2 = 0x4E, kDppHalfMirror = 0x141, kDppMirror = 0x140 };
template <int kControl, class T>
__device__ __forceinline__ T dpp(T value) {
  const int bits = bits_as<int>(value);
  return bits_as<T>(__builtin_amdgcn_update_dpp(bits, bits, kControl, 0xF, 0xF, true));
}

// Over the 16 lanes of a row, 16 * n to 16 * n + 15; all of them get the result. `combine` is commutative.
template <class T, class Combine>
__device__ __forceinline__ T reduce_over_16(T value, Combine combine) {
  value = combine(value, dpp<kDppXor1>(value));
  value = combine(value, dpp<kDppXor2>(value));
  value = combine(value, dpp<kDppHalfMirror>(value));
  return combine(value, dpp<kDppMirror>(value));
}
template <class T, class Combine>
__device__ __forceinline__ T reduce_over_wave(T value, Combine combine) {
  value = reduce_over_16(value, combine);
  value = combine(value, shuffle_xor(value, 16));
  return combine(value, shuffle_xor(value, 32));
}

struct Add {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
// A NaN on one side is ignored.
struct Largest {
  __device__ __forceinline__ float operator()(float a, float b) const { return __builtin_fmaxf(a, b); }
  __device__ __forceinline__ int32_t operator()(int32_t a, int32_t b) const { return a > b ? a : b; }
};
struct Smallest {
  __device__ __forceinline__ int32_t operator()(int32_t a, int32_t b) const { return a < b ? a : b; }
};

__device__ __forceinline__ int32_t wave_sum(int32_t value) { return reduce_over_wave(value, Add()); }
__device__ __forceinline__ int32_t wave_max(int32_t value) { return reduce_over_wave(value, Largest()); }
__device__ __forceinline__ int32_t wave_min(int32_t value) { return reduce_over_wave(value, Smallest()); }

// What lanes of this wave wrote to LDS is seen by its other lanes: a wave's LDS instructions are executed in order, so
// that only the compiler must not reorder.
__device__ __forceinline__ void wave_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

// As __syncthreads, for LDS alone: loads from memory and stores to it stay on their way.
__device__ __forceinline__ void lds_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

// --- Approximations of one instruction each, whose results are within 1 ulp, without denormals.
__device__ __forceinline__ float exp2_approximate(float x) { return __builtin_amdgcn_exp2f(x); }
__device__ __forceinline__ float log2_approximate(float x) { return __builtin_amdgcn_logf(x); }
__device__ __forceinline__ float reciprocal_approximate(float x) { return __builtin_amdgcn_rcpf(x); }

// --- Elements.
using BF16 = __bf16;
using F16 = _Float16;

// The architecture's own 8-bit type: the one whose instructions it has.
using NativeE4M3 = std::conditional_t<kGfx950, E4M3FN, E4M3FNUZ>;

// Four neighbours in a register, by the architecture's instructions, two results at a time.
template <bool kHigh>
__device__ __forceinline__ F32x2 native_e4m3_to_float(uint32_t four) {
  return __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(four), kHigh);
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(BF16 x) { return static_cast<float>(x); }
__device__ __forceinline__ float to_float(F16 x) { return static_cast<float>(x); }

// The value of 8-bit codes by way of fp16, whose exponent has a bit more and a bias of 15: shifted bits are 2^-8 (bias
// 7) or 2^-7 (bias 8) of the value, denormal or not. For the type that has no instructions.
__device__ __forceinline__ float shifted_e4m3(uint8_t bits) {
  return static_cast<float>(bits_as<F16>(static_cast<uint16_t>((bits & 0x80) << 8 | (bits & 0x7F) << 7)));
}
__device__ __forceinline__ float to_float(E4M3FN x) {
  if constexpr (kGfx950) return __builtin_amdgcn_cvt_f32_fp8(x.bits, 0);
  return (x.bits & 0x7F) == 0x7F ? NAN : shifted_e4m3(x.bits) * 256.0f;
}
__device__ __forceinline__ float to_float(E4M3FNUZ x) {
  if constexpr (!kGfx950) return __builtin_amdgcn_cvt_f32_fp8(x.bits, 0);
  return x.bits == 0x80 ? NAN : shifted_e4m3(x.bits) * 128.0f;
}

// A value that the architecture's 8-bit type cannot hold: the largest one with its sign, or NaN. What is left needs no
// more than rounding, whatever the wave's overflow mode is.
__device__ __forceinline__ float fit_native_e4m3(float x, bool saturate) {
  constexpr float kLargest = kGfx950 ? 448.0f : 240.0f;
  constexpr float kFirstLost = kGfx950 ? 464.0f : 248.0f;  // half way to the next; 464 still rounds to the even 448
  const float magnitude = __builtin_fabsf(x);
  if (saturate) return magnitude > kLargest ? __builtin_copysignf(kLargest, x) : x;
  const bool lost = kGfx950 ? magnitude > kFirstLost : magnitude >= kFirstLost;
  return lost ? NAN : x;
}

// Two values as 8-bit codes, the first in the low byte; kHigh: in the upper half of `old`, else in the lower.
template <bool kHigh>
__device__ __forceinline__ uint32_t native_e4m3_pair(float first, float second, bool saturate, uint32_t old = 0) {
  return static_cast<uint32_t>(__builtin_amdgcn_cvt_pk_fp8_f32(
      fit_native_e4m3(first, saturate), fit_native_e4m3(second, saturate), static_cast<int>(old), kHigh));
}

// Rounded to the nearest, ties to even; past the largest finite value of an 8-bit type NaN, or that value if
// `saturate`.
template <class Element>
__device__ __forceinline__ Element from_float(float x, bool saturate = false) {
  if constexpr (std::is_same_v<Element, NativeE4M3>) {
    return {static_cast<uint8_t>(native_e4m3_pair<false>(x, x, saturate))};
  } else if constexpr (std::is_same_v<Element, E4M3FN>) {
    return {e4m3fn_bits(x, saturate)};
  } else if constexpr (std::is_same_v<Element, E4M3FNUZ>) {
    return {e4m3fnuz_bits(x, saturate)};
  } else if constexpr (std::is_same_v<Element, F16>) {
    // clang 22 makes of a product and this cast one v_fma_mixlo_f16 that adds +0, and so loses the sign of a -0.
    asm("" : "+v"(x));
    return static_cast<F16>(x);
  } else {
    return static_cast<Element>(x);
  }
}

}  // namespace mla
