// update_cache's kernels: a warp copies or casts a token into the cache.
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

constexpr int kUpdateThreads = 128;
constexpr int kUpdateWarps = kUpdateThreads / kWarp;
constexpr int kRestoreBlocks = 264;  // they go through all tokens, if there are duplicates

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

// Stored: the cache's elements, or DsMla.
template <class Element, class Stored, Duplicates kDuplicates>
__device__ __forceinline__ void update_token(const UpdateCacheParams& p, int64_t token) {
  using Layout = CacheLayout<Stored>;
  using Latent = typename Layout::Latent;
  using Rope = typename Layout::Rope;
  constexpr int kCount = 16 / sizeof(Element);
  constexpr int kRopeLanes = kRope / kCount;  // each has one group of the rope key
  using Steps = RowSteps<kLatent / kCount>;
  constexpr int kSteps = Steps::kStepsARow;
  static_assert(kRopeLanes <= kWarp && Steps::kRowsAStep == 1);
  const int lane = threadIdx.x % kWarp;
  if (token >= p.tokens) return;
  const int32_t slot = p.slot_mapping[token];
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;

  const Element* kv_c = static_cast<const Element*>(p.kv_c) + token * kLatent;
  const Element* k_pe = static_cast<const Element*>(p.k_pe) + token * kRope;
  GroupBits<Element, kCount> latent[kSteps], rope;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    latent[step] = load_group<Element, kCount>(kv_c + Steps::group(step, lane) * kCount);
  }
  const bool has_rope = lane < kRopeLanes;
  if (has_rope) rope = load_group<Element, kCount>(k_pe + lane * kCount);

  const bool has_layer = layer >= 0 && layer < p.layers;
  bool is_stored = has_layer && in_cache(p, slot);
  if constexpr (kDuplicates == Duplicates::kSearched) {
    is_stored = is_stored && !has_later_one(p, slot, static_cast<int32_t>(token));
  } else if constexpr (kDuplicates == Duplicates::kInTable) {
    is_stored = is_stored && Owners{p}.owned_by(slot, static_cast<int32_t>(token));
  }
  // No early return: the compiler would load the token behind it, one wait after the other.
  unsigned char* target = nullptr;
  if (is_stored) {
    target = static_cast<unsigned char*>(p.cache) + (layer * p.pages * p.page_size + slot) * Layout::kRowBytes;
  }
  const Divisor divide = sizeof(Rope) == 1 && has_layer && p.k_scale != nullptr
                             ? Divisor(p.k_scale[p.k_scales > 1 ? layer : 0])
                             : Divisor();
  if constexpr (std::is_same_v<Stored, DsMla>) {
    const DsMlaScales<kDsMlaGroup / kCount, kSteps> scales(latent, p.power_of_two_scales);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto codes = ds_mla_codes(latent[step], scales.scale(step), scales.reciprocal(step));
      if (target != nullptr) store_group(target + Steps::group(step, lane) * kCount, codes);
    }
    if (target != nullptr && scales.is_first_with_it()) {
      const int group = Steps::group(scales.own_step(), lane) * kCount / kDsMlaGroup;
      reinterpret_cast<float*>(target + kLatent)[group] = scales.own_scale();
    }
  } else {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto stored = store_as<Latent>(latent[step], divide, p.saturate);
      if (target != nullptr) store_group(target + Steps::group(step, lane) * kCount * sizeof(Latent), stored);
    }
  }
  if (target == nullptr || !has_rope) return;
  store_group(target + Layout::kRopeByte + lane * kCount * sizeof(Rope), store_as<Rope>(rope, divide, p.saturate));
}

// Few tokens.
template <class Element, class Stored>
__device__ __forceinline__ void update_few(const UpdateCacheParams& p) {
  const int64_t token = int64_t{blockIdx.x} * kUpdateWarps + threadIdx.x / kWarp;
  update_token<Element, Stored, Duplicates::kSearched>(p, token);
}

// Many tokens: the first `claiming` CTAs fill the table, the others store.
template <class Element, class Stored>
__device__ __forceinline__ void update_many(const UpdateCacheParams& p, int32_t claiming) {
  ptx::launch_dependents();
  const int64_t block = int64_t{blockIdx.x} - claiming;
  if (block < 0) return claim_slot(p, int64_t{blockIdx.x} * kUpdateThreads + threadIdx.x);
  update_token<Element, Stored, Duplicates::kIgnored>(p, block * kUpdateWarps + threadIdx.x / kWarp);
}

// Behind update_many.
template <class Element, class Stored>
__device__ __forceinline__ void restore_last(const UpdateCacheParams& p) {
  ptx::wait_for_previous_kernel();
  if (!Owners{p}.has_duplicates()) return;
#pragma unroll 1
  for (int64_t token = int64_t{blockIdx.x} * kUpdateWarps + threadIdx.x / kWarp; token < p.tokens;
       token += int64_t{kRestoreBlocks} * kUpdateWarps) {
    update_token<Element, Stored, Duplicates::kInTable>(p, token);
  }
}

}  // namespace mla
