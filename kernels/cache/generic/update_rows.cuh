// update_cache's kernels: a warp copies or casts a few tokens into the cache, each where it is the last for its slot.
//
// Tokens are on their way before it is known where they go: first the kernel that fills the table of owners is still
// running, then the searches of a warp take as long as its loads.
#pragma once

#include "kernels/cache/generic/ds_mla_codes.cuh"
#include "kernels/cache/generic/layout.cuh"
#include "kernels/cache/generic/owners.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/rows.cuh"
#include "kernels/group.h"
#include "kernels/params.h"

namespace mla {

constexpr int kClaimThreads = 128;
#if defined(JAX_MLA_TUNE) && JAX_MLA_TUNE == 1
constexpr int kUpdateThreads = 256;
#else
constexpr int kUpdateThreads = 128;
#endif

template <class Element>
struct UpdateShape {
  static constexpr int kCount = 16 / sizeof(Element);
  static constexpr int kRopeLanes = kRope / kCount;   // of a token: each has one group of its rope key
  static constexpr int kTokens = kWarp / kRopeLanes;  // of a warp
  static constexpr int kBlockTokens = kUpdateThreads / kWarp * kTokens;
};

__device__ __forceinline__ void claim_slot(const UpdateCacheParams& p) {
  ptx::launch_dependents();
  const int64_t token = int64_t{blockIdx.x} * kClaimThreads + threadIdx.x;
  if (token >= p.tokens) return;
  const int32_t slot = p.slot_mapping[token];
  if (in_cache(p, slot)) Owners{p}.claim(slot, static_cast<int32_t>(token));
}

// Whether the token is the last for a slot of the cache. All lanes of a warp ask, in groups of kLanes for a token each.
template <int kLanes>
__device__ __forceinline__ bool is_last_of_slot(const UpdateCacheParams& p, int32_t slot, int32_t token) {
  if (p.owner_slots > 0) return in_cache(p, slot) && Owners{p}.owned_by(slot, token);
  bool later_one = false;
  const int lane = threadIdx.x % kWarp;
  for (int32_t later = token + 1 + lane % kLanes; later < p.tokens; later += kLanes) {
    later_one = later_one || p.slot_mapping[later] == slot;
  }
  const LaneMask asking = ((LaneMask{1} << kLanes) - 1) << (lane / kLanes * kLanes);
  return (ballot(later_one) & asking) == 0 && in_cache(p, slot);
}

// What a value becomes in the cache, but for fp8_ds_mla's latent.
template <class Stored, class Element, int kCount>
__device__ __forceinline__ GroupBits<Stored, kCount> store_as(const GroupBits<Element, kCount>& group,
                                                              const Divisor& divide, bool saturate) {
  if constexpr (sizeof(Stored) == 1) return convert_group<Stored>(group, {1, divide, saturate});
  return convert_group<Stored>(group, {});
}

// Stored: the cache's elements, or DsMla.
template <class Element, class Stored>
__device__ __forceinline__ void update_rows(const UpdateCacheParams& p) {
  using Shape = UpdateShape<Element>;
  using Layout = CacheLayout<Stored>;
  using Latent = typename Layout::Latent;
  using Rope = typename Layout::Rope;
  constexpr int kCount = Shape::kCount, kRopeLanes = Shape::kRopeLanes;
  using Steps = RowSteps<kLatent / kCount>;
  constexpr int kSteps = Shape::kTokens / Steps::kRowsAStep * Steps::kStepsARow;
  constexpr bool kDsMla = std::is_same_v<Stored, DsMla>;
  const int lane = threadIdx.x % kWarp;
  const int64_t first = int64_t{blockIdx.x} * Shape::kBlockTokens + threadIdx.x / kWarp * Shape::kTokens;
  if (first >= p.tokens) return;
  const int64_t left = p.tokens - first;
  const int row = lane / kRopeLanes, rope_group = lane % kRopeLanes;
  const int32_t slot = row < left ? p.slot_mapping[first + row] : -1;
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;

  const Element* kv_c = static_cast<const Element*>(p.kv_c) + first * kLatent;
  const Element* k_pe = static_cast<const Element*>(p.k_pe) + first * kRope;
  GroupBits<Element, kCount> latent[kSteps], rope;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (Steps::row(step, lane) >= left) continue;
    latent[step] = load_group<Element, kCount, /*kOnce=*/true>(kv_c + (step * kWarp + lane) * kCount);
  }
  if (row < left) rope = load_group<Element, kCount, /*kOnce=*/true>(k_pe + lane * kCount);

  ptx::wait_for_previous_kernel();
  const bool has_layer = layer >= 0 && layer < p.layers;
  const bool last = is_last_of_slot<kRopeLanes>(p, slot, static_cast<int32_t>(first) + row);
  unsigned char* target = nullptr;
  if (has_layer && last) {
    target = static_cast<unsigned char*>(p.cache) + (layer * p.pages * p.page_size + slot) * Layout::kRowBytes;
  }
  const Divisor divide = sizeof(Rope) == 1 && has_layer && p.k_scale != nullptr
                             ? Divisor(p.k_scale[p.k_scales > 1 ? layer : 0])
                             : Divisor();
  if constexpr (kDsMla) {
    const DsMlaScales<kDsMlaGroup / kCount, kSteps> scales(latent, p.power_of_two_scales);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      unsigned char* const to = shuffle_address(target, Steps::row(step, lane) * kRopeLanes);
      const float scale = scales.scale(step), reciprocal = scales.reciprocal(step);
      if (to == nullptr) continue;
      store_group(to + Steps::group(step, lane) * kCount, ds_mla_codes(latent[step], scale, reciprocal));
    }
    const int step = scales.own_step();
    unsigned char* const to = shuffle_address(target, Steps::row(step, lane) * kRopeLanes);
    if (to != nullptr && scales.is_first_with_it()) {
      reinterpret_cast<float*>(to + kLatent)[Steps::group(step, lane) * kCount / kDsMlaGroup] = scales.own_scale();
    }
  } else {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      unsigned char* const to = shuffle_address(target, Steps::row(step, lane) * kRopeLanes);
      if (to == nullptr) continue;
      store_group(to + Steps::group(step, lane) * kCount * sizeof(Latent),
                  store_as<Latent>(latent[step], divide, p.saturate));
    }
  }
  if (target == nullptr) return;
  store_group(target + Layout::kRopeByte + rope_group * kCount * sizeof(Rope),
              store_as<Rope>(rope, divide, p.saturate));
}

}  // namespace mla
