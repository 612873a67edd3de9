// update_cache: one warp a token copies or casts its latent and rope into the cache, where the token is the last for
// its slot.
#include <type_traits>

#include "kernels/cache/generic/ds_mla.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"

namespace mla {
namespace {

constexpr int kThreads = 256;
constexpr int kTokensPerCta = kThreads / 32;
constexpr int32_t kFree = -1;  // an unused entry of the owners, which are set to bytes of 0xFF

// The last token of each slot, in an open-addressing hash table of (slot, token).
struct Owners {
  int32_t* entries;
  uint32_t mask;  // entries - 1, a power of two less one

  __device__ uint32_t first(int32_t slot) const {
    const uint32_t mixed = static_cast<uint32_t>(slot) * 0x9E3779B1u;  // 2^32 / golden ratio: Fibonacci hashing
    return (mixed ^ mixed >> 15) & mask;
  }

  // Which entry a slot gets depends on the order of the threads; that it has one, and whose token is in it, does not.
  __device__ void claim(int32_t slot, int32_t token) const {
    uint32_t i = first(slot);
    for (uint32_t tries = 0; tries <= mask; ++tries, i = (i + 1) & mask) {
      const int32_t found = atomicCAS(entries + 2 * int64_t{i}, kFree, slot);
      if (found != kFree && found != slot) continue;
      atomicMax(entries + 2 * int64_t{i} + 1, token);
      return;
    }
  }

  __device__ bool owned_by(int32_t slot, int32_t token) const {
    uint32_t i = first(slot);
    for (uint32_t tries = 0; tries <= mask && entries[2 * int64_t{i}] != slot; ++tries) i = (i + 1) & mask;
    return entries[2 * int64_t{i} + 1] == token;
  }
};

__device__ bool in_cache(const UpdateCacheParams& p, int32_t slot) { return slot >= 0 && slot < p.pages * p.page_size; }

__global__ void __launch_bounds__(kThreads) claim_kernel(const __grid_constant__ UpdateCacheParams p) {
  const int64_t token = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (token >= p.tokens) return;
  const int32_t slot = p.slot_mapping[token];
  const Owners owners{p.owners, static_cast<uint32_t>(p.owner_slots) - 1};
  if (in_cache(p, slot)) owners.claim(slot, static_cast<int32_t>(token));
}

// Asked by a whole warp.
__device__ bool is_last_of_slot(const UpdateCacheParams& p, int32_t slot, int32_t token) {
  if (p.owner_slots > 0) {
    return Owners{p.owners, static_cast<uint32_t>(p.owner_slots) - 1}.owned_by(slot, token);
  }
  constexpr uint32_t kWholeWarp = 0xFFFFFFFF;
  for (int64_t base = int64_t{token} + 1; base < p.tokens; base += 32) {
    const int64_t later = base + threadIdx.x % 32;
    if (__any_sync(kWholeWarp, later < p.tokens && p.slot_mapping[later] == slot)) return false;
  }
  return true;
}

template <class Stored, class Element>
__device__ __forceinline__ Stored convert(Element x, float scale, bool saturate) {
  if constexpr (std::is_same_v<Stored, Element>) {
    return x;
  } else {
    return Stored{e4m3fn_bits(to_float(x) / scale, saturate)};
  }
}

template <class Element, class Stored>
__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ UpdateCacheParams p) {
  constexpr int kCount = 16 / sizeof(Element);  // elements in one access
  const int64_t token = int64_t{blockIdx.x} * kTokensPerCta + threadIdx.x / 32;
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  if (token >= p.tokens || layer < 0 || layer >= p.layers) return;
  const int32_t slot = p.slot_mapping[token];
  if (!in_cache(p, slot) || !is_last_of_slot(p, slot, static_cast<int32_t>(token))) return;

  const float scale = p.k_scale == nullptr ? 1.0f : p.k_scale[p.k_scales > 1 ? layer : 0];
  const auto* latent = static_cast<const Vector<Element, kCount>*>(p.kv_c) + token * (kLatent / kCount);
  const auto* rope = static_cast<const Vector<Element, kCount>*>(p.k_pe) + token * (kRope / kCount);
  auto* target =
      static_cast<Vector<Stored, kCount>*>(p.cache) + (layer * p.pages * p.page_size + slot) * (kWidth / kCount);
  for (int i = threadIdx.x % 32; i < kWidth / kCount; i += 32) {
    const Vector<Element, kCount> read = i < kLatent / kCount ? latent[i] : rope[i - kLatent / kCount];
    Vector<Stored, kCount> stored;
#pragma unroll
    for (int k = 0; k < kCount; ++k) stored.at[k] = convert<Stored>(read.at[k], scale, p.saturate);
    target[i] = stored;
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads) update_ds_mla_kernel(const __grid_constant__ UpdateCacheParams p) {
  const int64_t token = int64_t{blockIdx.x} * kTokensPerCta + threadIdx.x / 32;
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  if (token >= p.tokens || layer < 0 || layer >= p.layers) return;
  const int32_t slot = p.slot_mapping[token];
  if (!in_cache(p, slot) || !is_last_of_slot(p, slot, static_cast<int32_t>(token))) return;
  store_ds_mla(static_cast<const Element*>(p.kv_c) + token * kLatent,
               static_cast<const Element*>(p.k_pe) + token * kRope, p.power_of_two_scales,
               static_cast<unsigned char*>(p.cache) + (layer * p.pages * p.page_size + slot) * kDsMlaBytes);
}

template <class Element>
Error launch_update(const UpdateCacheParams& params, const Device& device) {
  LaunchShape shape;
  shape.grid = dim3((params.tokens + int64_t{kTokensPerCta} - 1) / kTokensPerCta);
  shape.block = dim3(kThreads);
  if (params.ds_mla) return launch("update_cache", update_ds_mla_kernel<Element>, shape, device, params);
  if (params.cache_dtype == params.input_dtype && params.k_scale == nullptr) {
    return launch("update_cache", update_kernel<Element, Element>, shape, device, params);
  }
  if (params.cache_dtype == DType::kE4M3FN) {
    return launch("update_cache", update_kernel<Element, E4M3FN>, shape, device, params);
  }
  return std::string("jax_mla: update_cache on CUDA cannot store ") + name_of(params.input_dtype) + " in a cache of " +
         name_of(params.cache_dtype) + (params.k_scale == nullptr ? "" : " with k_scale");
}

Error claim_slots(const UpdateCacheParams& params, const Device& device) {
  const size_t bytes = size_t{2} * params.owner_slots * sizeof(int32_t);
  const cudaError_t status = cudaMemsetAsync(params.owners, 0xFF, bytes, stream_of(device));
  if (status != cudaSuccess) {
    return device_error("jax_mla: update_cache cannot clear " + std::to_string(bytes) + " bytes", status);
  }
  LaunchShape shape;
  shape.grid = dim3((params.tokens + int64_t{kThreads} - 1) / kThreads);
  shape.block = dim3(kThreads);
  return launch("update_cache's search for duplicates", claim_kernel, shape, device, params);
}

}  // namespace

Error update_cache(const UpdateCacheParams& params, const Device& device) {
  if (params.tokens == 0) return {};
  if (params.owner_slots > 0) {
    Error error = claim_slots(params, device);
    if (!error.empty()) return error;
  }
  switch (params.input_dtype) {
    case DType::kF32: return launch_update<float>(params, device);
    case DType::kBF16: return launch_update<__nv_bfloat16>(params, device);
    case DType::kF16: return launch_update<__half>(params, device);
    default: return std::string("jax_mla: update_cache on CUDA cannot read ") + name_of(params.input_dtype);
  }
}

}  // namespace mla
