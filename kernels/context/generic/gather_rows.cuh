// gather_context's kernel: rows of one chunk of cached context, from the pages where they lie into a workspace,
// dequantised.
//
// A warp has a row to itself and waits for nobody: three loads behind one another lead to it (the requests' pieces, the
// page, the row), all of which is on its way before the first group is stored.
#pragma once

#include "kernels/cache/generic/layout.cuh"
#include "kernels/cuda/rows.cuh"
#include "kernels/group.h"
#include "kernels/params.h"

namespace mla {

constexpr int kGatherThreads = 128;
constexpr int kGatherRows = kGatherThreads / kWarp;  // of a CTA

// The slot of a row of the workspace, or -1. All lanes of a warp ask for the same one.
__device__ __forceinline__ int64_t find_slot(const GatherContextParams& p, int64_t w) {
  const int lane = threadIdx.x % kWarp;
  int32_t request = -1, begin = 0, start = 0;  // of the first piece that ends behind w
  for (int32_t base = 0; base < p.batch && request < 0; base += kWarp) {
    const int32_t candidate = base + lane;
    const bool exists = candidate < p.batch;
    const int32_t its_begin = exists ? p.cu_kv_lens[candidate] : 0, its_end = exists ? p.cu_kv_lens[candidate + 1] : 0,
                  its_start = exists ? p.starts[candidate] : 0;
    const LaneMask ends_behind = ballot(exists && its_end > w);
    if (ends_behind == 0) continue;
    const int found = first_lane(ends_behind);
    request = base + found;
    begin = __shfl_sync(kWholeWave, its_begin, found);
    start = __shfl_sync(kWholeWave, its_start, found);
  }
  const int64_t token = start + (w - begin);
  if (request < 0 || w < begin || token < 0 || token > INT32_MAX) return -1;
  const auto page_of_request = static_cast<uint32_t>(token) / static_cast<uint32_t>(p.page_size);
  if (page_of_request >= static_cast<uint32_t>(p.max_pages)) return -1;
  const int32_t page = p.page_table[int64_t{request} * p.max_pages + page_of_request];
  if (page < 0 || page >= p.pages) return -1;
  return int64_t{page} * p.page_size + (static_cast<uint32_t>(token) - page_of_request * p.page_size);
}

template <class Cached, class Output>
__device__ __forceinline__ void gather_row(const GatherContextParams& p) {
  using Layout = CacheLayout<Cached>;
  using Latent = typename Layout::Latent;
  using Rope = typename Layout::Rope;
  constexpr int kCount = kWidestGroup<Latent, Output>;
  constexpr int kRopeLanes = kRope / kCount;  // each has one group of the rope key
  using Steps = RowSteps<kLatent / kCount>;
  constexpr int kSteps = Steps::kStepsARow;
  static_assert(kRopeLanes <= kWarp && Steps::kRowsAStep == 1);
  constexpr int kScales = kLatent / kDsMlaGroup;
  constexpr bool kOwnScales = std::is_same_v<Cached, DsMla>;
  constexpr bool kScaled = sizeof(Latent) == 1 && !kOwnScales;

  const int lane = threadIdx.x % kWarp;
  const int64_t row = int64_t{blockIdx.x} * kGatherRows + threadIdx.x / kWarp;
  if (row >= p.rows) return;
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  const int64_t slot = find_slot(p, row);
  const bool has_layer = layer >= 0 && layer < p.layers, is_there = has_layer && slot >= 0,
             has_rope = lane < kRopeLanes;

  GroupBits<Latent, kCount> latent[kSteps];
  GroupBits<Rope, kCount> rope;
  float scale = 1;  // or, of the row's own, one in each lane
  if (is_there) {
    const unsigned char* const source =
        static_cast<const unsigned char*>(p.cache) + (layer * p.pages * p.page_size + slot) * Layout::kRowBytes;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      latent[step] = load_group<Latent, kCount>(source + Steps::group(step, lane) * kCount * sizeof(Latent));
    }
    if (has_rope) rope = load_group<Rope, kCount>(source + Layout::kRopeByte + lane * kCount * sizeof(Rope));
    if (kOwnScales) scale = read_only(reinterpret_cast<const float*>(source + kLatent) + lane % kScales);
  }
  if (kScaled && has_layer && p.k_scale != nullptr) scale = p.k_scale[p.k_scales > 1 ? layer : 0];

  auto* const latent_out = static_cast<Output*>(p.latent) + row * kLatent;
  auto* const rope_out = static_cast<Output*>(p.rope) + row * kRope;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int group = Steps::group(step, lane);
    const float step_scale = kOwnScales ? __shfl_sync(kWholeWave, scale, group * kCount / kDsMlaGroup) : scale;
    GroupBits<Output, kCount> converted{};
    if (is_there) converted = convert_group<Output>(latent[step], {step_scale});
    store_group(latent_out + group * kCount, converted);
  }
  if (!has_rope) return;
  GroupBits<Output, kCount> converted{};
  if (is_there) converted = convert_group<Output>(rope, {kScaled ? scale : 1.0f});
  store_group(rope_out + lane * kCount, converted);
}

}  // namespace mla
