// update_cache's kernels: a warp copies or casts a token or a few into the cache.
//
// Few tokens look for later ones of their slot on their own. Of many, all are stored as if slots were distinct, which
// they hardly ever are not, beside CTAs that fill a table of each slot's last token; behind them a kernel that finds a
// duplicate in the table stores the last ones again.
#pragma once

#include "kernels/cache/generic/ds_mla_codes.cuh"
#include "kernels/cache/generic/layout.cuh"
#include "kernels/cache/generic/owners.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/rows.cuh"
#include "kernels/group.h"
#include "kernels/params.h"

namespace mla {

#ifndef JAX_MLA_UPDATE_THREADS
#define JAX_MLA_UPDATE_THREADS 128
#endif
#ifndef JAX_MLA_UPDATE_TOKENS
#define JAX_MLA_UPDATE_TOKENS 1
#endif
constexpr int kUpdateThreads = JAX_MLA_UPDATE_THREADS;
constexpr int kRestoreBlocks = 264;  // they go through all tokens, if there are duplicates

template <class Element>
struct UpdateShape {
  static constexpr int kCount = 16 / sizeof(Element);
  static constexpr int kRopeLanes = kRope / kCount;  // of a token: each has one group of its rope key
  static constexpr int kManyTokens =                 // of a warp, if there are many
      JAX_MLA_UPDATE_TOKENS * kRopeLanes > kWarp ? kWarp / kRopeLanes : JAX_MLA_UPDATE_TOKENS;
  static constexpr int kBlockTokens = kUpdateThreads / kWarp * kManyTokens;
};

__device__ __forceinline__ void claim_slot(const UpdateCacheParams& p, int64_t token) {
  if (token >= p.tokens) return;
  const int32_t slot = p.slot_mapping[token];
  if (in_cache(p, slot)) Owners{p}.claim(slot, static_cast<int32_t>(token));
}

// Asked by a whole warp.
__device__ __forceinline__ bool has_later_one(const UpdateCacheParams& p, int32_t slot, int32_t token) {
  bool later_one = false;
#pragma unroll 4
  for (int32_t later = token + 1 + threadIdx.x % kWarp; later < p.tokens; later += kWarp) {
    later_one = later_one || p.slot_mapping[later] == slot;
  }
  return any_lane(later_one);
}

// What a value becomes in the cache, but for fp8_ds_mla's latent.
template <class Stored, class Element, int kCount>
__device__ __forceinline__ GroupBits<Stored, kCount> store_as(const GroupBits<Element, kCount>& group,
                                                              const Divisor& divide, bool saturate) {
  if constexpr (sizeof(Stored) == 1) return convert_group<Stored>(group, {1, divide, saturate});
  return convert_group<Stored>(group, {});
}

// What decides whether a token is stored.
enum class Duplicates { kSearched, kIgnored, kInTable };

// The tokens of a warp from `first` on. Stored: the cache's elements, or DsMla.
template <class Element, class Stored, int kTokens, Duplicates kDuplicates>
__device__ __forceinline__ void update_tokens(const UpdateCacheParams& p, int64_t first) {
  using Shape = UpdateShape<Element>;
  using Layout = CacheLayout<Stored>;
  using Latent = typename Layout::Latent;
  using Rope = typename Layout::Rope;
  constexpr int kCount = Shape::kCount, kRopeLanes = Shape::kRopeLanes;
  constexpr int kSlotLanes = kWarp / kTokens;  // of a token: all have its slot
  using Steps = RowSteps<kLatent / kCount>;
  constexpr int kSteps = kTokens / Steps::kRowsAStep * Steps::kStepsARow;
  static_assert(kTokens * kRopeLanes <= kWarp && (kDuplicates != Duplicates::kSearched || kTokens == 1));
  constexpr bool kDsMla = std::is_same_v<Stored, DsMla>;
  const int lane = threadIdx.x % kWarp;
  if (first >= p.tokens) return;
  const int64_t left = p.tokens - first;
  const int slot_row = lane / kSlotLanes, rope_row = lane / kRopeLanes, rope_group = lane % kRopeLanes;
  const int32_t slot = slot_row < left ? p.slot_mapping[first + slot_row] : -1;
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;

  const Element* kv_c = static_cast<const Element*>(p.kv_c) + first * kLatent;
  const Element* k_pe = static_cast<const Element*>(p.k_pe) + first * kRope;
  GroupBits<Element, kCount> latent[kSteps], rope;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (Steps::row(step, lane) >= left) continue;
    latent[step] = load_group<Element, kCount, /*kOnce=*/true>(kv_c + (step * kWarp + lane) * kCount);
  }
  const bool has_rope = rope_row < kTokens && rope_row < left;
  if (has_rope) rope = load_group<Element, kCount, /*kOnce=*/true>(k_pe + lane * kCount);

  const bool has_layer = layer >= 0 && layer < p.layers;
  bool is_stored = has_layer && in_cache(p, slot);
  if constexpr (kDuplicates == Duplicates::kSearched) {
    is_stored = is_stored && !has_later_one(p, slot, static_cast<int32_t>(first));
  } else if constexpr (kDuplicates == Duplicates::kInTable) {
    is_stored = is_stored && Owners{p}.owned_by(slot, static_cast<int32_t>(first) + slot_row);
  }
  unsigned char* target = nullptr;
  if (is_stored) {
    target = static_cast<unsigned char*>(p.cache) + (layer * p.pages * p.page_size + slot) * Layout::kRowBytes;
  }
  const Divisor divide = sizeof(Rope) == 1 && has_layer && p.k_scale != nullptr
                             ? Divisor(p.k_scale[p.k_scales > 1 ? layer : 0])
                             : Divisor();
  if constexpr (kDsMla) {
    const DsMlaScales<kDsMlaGroup / kCount, kSteps> scales(latent, p.power_of_two_scales);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      unsigned char* const to = address_of_row<kTokens>(target, Steps::row(step, lane));
      const float scale = scales.scale(step), reciprocal = scales.reciprocal(step);
      if (to == nullptr) continue;
      store_group(to + Steps::group(step, lane) * kCount, ds_mla_codes(latent[step], scale, reciprocal));
    }
    const int step = scales.own_step();
    unsigned char* const to = address_of_row<kTokens>(target, Steps::row(step, lane));
    if (to != nullptr && scales.is_first_with_it()) {
      reinterpret_cast<float*>(to + kLatent)[Steps::group(step, lane) * kCount / kDsMlaGroup] = scales.own_scale();
    }
  } else {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      unsigned char* const to = address_of_row<kTokens>(target, Steps::row(step, lane));
      if (to == nullptr) continue;
      store_group(to + Steps::group(step, lane) * kCount * sizeof(Latent),
                  store_as<Latent>(latent[step], divide, p.saturate));
    }
  }
  unsigned char* const to = address_of_row<kTokens>(target, rope_row % kTokens);
  if (!has_rope || to == nullptr) return;
  store_group(to + Layout::kRopeByte + rope_group * kCount * sizeof(Rope), store_as<Rope>(rope, divide, p.saturate));
}

// Few tokens, a warp each.
template <class Element, class Stored>
__device__ __forceinline__ void update_few(const UpdateCacheParams& p) {
  const int64_t token = int64_t{blockIdx.x} * (kUpdateThreads / kWarp) + threadIdx.x / kWarp;
  update_tokens<Element, Stored, 1, Duplicates::kSearched>(p, token);
}

// Many tokens: the first `claiming` CTAs fill the table, the others store.
template <class Element, class Stored>
__device__ __forceinline__ void update_many(const UpdateCacheParams& p, int32_t claiming) {
  using Shape = UpdateShape<Element>;
  ptx::launch_dependents();
  const int64_t block = int64_t{blockIdx.x} - claiming;
  if (block < 0) return claim_slot(p, int64_t{blockIdx.x} * kUpdateThreads + threadIdx.x);
  update_tokens<Element, Stored, Shape::kManyTokens, Duplicates::kIgnored>(
      p, block * Shape::kBlockTokens + threadIdx.x / kWarp * Shape::kManyTokens);
}

// Behind update_many.
template <class Element, class Stored>
__device__ __forceinline__ void restore_last(const UpdateCacheParams& p) {
  ptx::wait_for_previous_kernel();
  if (!Owners{p}.has_duplicates()) return;
  constexpr int kWarps = kUpdateThreads / kWarp;
#pragma unroll 1
  for (int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; token < p.tokens;
       token += int64_t{kRestoreBlocks} * kWarps) {
    update_tokens<Element, Stored, 1, Duplicates::kInTable>(p, token);
  }
}

}  // namespace mla
