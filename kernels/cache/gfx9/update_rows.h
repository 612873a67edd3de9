// update_cache's kernels on AMD: one wave a token copies or casts its latent and rope into the cache, where
// the token is the last for its slot.
#pragma once

#include <type_traits>

#include "kernels/cache/gfx9/ds_mla_row.h"
#include "kernels/gpu.h"
#include "kernels/params.h"

namespace mla {

constexpr int kUpdateThreads = 256;
constexpr int kUpdateTokens = kUpdateThreads / kWave;  // a block
constexpr int32_t kFree = -1;                          // an unused entry of the owners, which are set to bytes of 0xFF

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

__device__ __forceinline__ void claim_slot(const UpdateCacheParams& p) {
  const int64_t token = int64_t{blockIdx.x} * kUpdateThreads + threadIdx.x;
  if (token >= p.tokens) return;
  const int32_t slot = p.slot_mapping[token];
  const Owners owners{p.owners, static_cast<uint32_t>(p.owner_slots) - 1};
  if (in_cache(p, slot)) owners.claim(slot, static_cast<int32_t>(token));
}

// Asked by a whole wave.
__device__ bool is_last_of_slot(const UpdateCacheParams& p, int32_t slot, int32_t token) {
  if (p.owner_slots > 0) {
    return Owners{p.owners, static_cast<uint32_t>(p.owner_slots) - 1}.owned_by(slot, token);
  }
  for (int64_t base = int64_t{token} + 1; base < p.tokens; base += kWave) {
    const int64_t later = base + threadIdx.x % kWave;
    if (any_lane(later < p.tokens && p.slot_mapping[later] == slot)) return false;
  }
  return true;
}

template <class Stored, class Element>
__device__ __forceinline__ Stored convert(Element x, float scale, bool saturate) {
  if constexpr (std::is_same_v<Stored, Element>) {
    return x;
  } else {
    return from_float<Stored>(to_float(x) / scale, saturate);
  }
}

template <class Element, class Stored>
__device__ __forceinline__ void update_rows(const UpdateCacheParams& p) {
  constexpr int kCount = 16 / sizeof(Element);  // elements in one access
  const int64_t token = int64_t{blockIdx.x} * kUpdateTokens + threadIdx.x / kWave;
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  if (token >= p.tokens || layer < 0 || layer >= p.layers) return;
  const int32_t slot = p.slot_mapping[token];
  if (!in_cache(p, slot) || !is_last_of_slot(p, slot, static_cast<int32_t>(token))) return;

  const float scale = p.k_scale == nullptr ? 1.0f : p.k_scale[p.k_scales > 1 ? layer : 0];
  const auto* latent = static_cast<const Vector<Element, kCount>*>(p.kv_c) + token * (kLatent / kCount);
  const auto* rope = static_cast<const Vector<Element, kCount>*>(p.k_pe) + token * (kRope / kCount);
  auto* target =
      static_cast<Vector<Stored, kCount>*>(p.cache) + (layer * p.pages * p.page_size + slot) * (kWidth / kCount);
  for (int i = threadIdx.x % kWave; i < kWidth / kCount; i += kWave) {
    const Vector<Element, kCount> read = i < kLatent / kCount ? latent[i] : rope[i - kLatent / kCount];
    Vector<Stored, kCount> stored;
#pragma unroll
    for (int k = 0; k < kCount; ++k) stored.at[k] = convert<Stored>(read.at[k], scale, p.saturate);
    target[i] = stored;
  }
}

// Likewise, as fp8_ds_mla.
template <class Element>
__device__ __forceinline__ void update_ds_mla_rows(const UpdateCacheParams& p) {
  const int64_t token = int64_t{blockIdx.x} * kUpdateTokens + threadIdx.x / kWave;
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  if (token >= p.tokens || layer < 0 || layer >= p.layers) return;
  const int32_t slot = p.slot_mapping[token];
  if (!in_cache(p, slot) || !is_last_of_slot(p, slot, static_cast<int32_t>(token))) return;
  auto* const cache = static_cast<unsigned char*>(p.cache);
  store_ds_mla(static_cast<const Element*>(p.kv_c) + token * kLatent,
               static_cast<const Element*>(p.k_pe) + token * kRope, p.power_of_two_scales,
               cache + (layer * p.pages * p.page_size + slot) * kDsMlaBytes);
}

}  // namespace mla
