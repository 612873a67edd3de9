// gather_context's kernel: rows of one chunk of cached context, from the pages where they lie into a workspace,
// dequantised.
//
// A warp has a few rows to itself and waits for nobody: three loads behind one another lead to its rows (the requests'
// pieces, the page, the rows), all of which are on their way before the first is stored.
#pragma once

#include "kernels/cache/generic/layout.cuh"
#include "kernels/cuda/rows.cuh"
#include "kernels/group.h"
#include "kernels/params.h"

namespace mla {

#ifndef JAX_MLA_GATHER_THREADS
#define JAX_MLA_GATHER_THREADS 128
#endif
#ifndef JAX_MLA_GATHER_ROWS  // of a warp: 1, 2 or 4; or 0: pieces of the output in their order
#define JAX_MLA_GATHER_ROWS 1
#endif
#ifndef JAX_MLA_GATHER_PIECES  // of a lane, where pieces go in their order
#define JAX_MLA_GATHER_PIECES 1
#endif
constexpr int kGatherThreads = JAX_MLA_GATHER_THREADS;

template <class Cached, class Output>
struct GatherShape {
  static constexpr int kCount = kWidestGroup<typename CacheLayout<Cached>::Latent, Output>;
  static constexpr int kRopeLanes = kRope / kCount;  // of a row: each has one group of its rope key
  static constexpr int kRowGroups = kWidth / kCount;
  static constexpr int kRows =
      JAX_MLA_GATHER_ROWS * kRopeLanes > kWarp ? kWarp / kRopeLanes : JAX_MLA_GATHER_ROWS;  // of a warp
  static constexpr int kBlockRows = kGatherThreads / kWarp * kRows;
  static constexpr int kBlockPieces = kGatherThreads * JAX_MLA_GATHER_PIECES;
  static int64_t blocks(int64_t rows) {
    if constexpr (kRows == 0)
      return (rows * kRowGroups + kBlockPieces - 1) / kBlockPieces;
    else
      return (rows + kBlockRows - 1) / kBlockRows;
  }
};

// The slot of a row of the workspace, or -1. All lanes of a warp ask, in groups of kLanes for each row from `first` on.
template <int kLanes>
__device__ __forceinline__ int64_t find_slot(const GatherContextParams& p, int64_t first) {
  const int lane = threadIdx.x % kWarp;
  const int64_t w = first + lane / kLanes;
  int32_t request = -1, begin = 0, start = 0;  // of the first piece that ends behind w
  for (int32_t base = 0; base < p.batch; base += kWarp) {
    const int32_t candidate = base + lane;
    const bool exists = candidate < p.batch;
    const int32_t its_begin = exists ? p.cu_kv_lens[candidate] : 0, its_end = exists ? p.cu_kv_lens[candidate + 1] : 0,
                  its_start = exists ? p.starts[candidate] : 0;
    LaneMask ends_behind = 0;
#pragma unroll
    for (int row = 0; row < kWarp / kLanes; ++row) {
      const LaneMask mask = ballot(exists && its_end > first + row);
      if (lane / kLanes == row) ends_behind = mask;
    }
    const int found = ends_behind == 0 ? 0 : first_lane(ends_behind);
    const int32_t found_begin = __shfl_sync(kWholeWave, its_begin, found),
                  found_start = __shfl_sync(kWholeWave, its_start, found);
    if (request < 0 && ends_behind != 0) {
      request = base + found;
      begin = found_begin;
      start = found_start;
    }
    if (!any_lane(request < 0)) break;
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
__device__ __forceinline__ void gather_by_rows(const GatherContextParams& p) {
  using Shape = GatherShape<Cached, Output>;
  using Layout = CacheLayout<Cached>;
  using Latent = typename Layout::Latent;
  using Rope = typename Layout::Rope;
  constexpr int kCount = Shape::kCount, kRopeLanes = Shape::kRopeLanes;
  using Steps = RowSteps<kLatent / kCount>;
  constexpr int kSteps = Shape::kRows / Steps::kRowsAStep * Steps::kStepsARow;
  constexpr int kSlotLanes = kWarp / Shape::kRows;
  constexpr int kScales = kLatent / kDsMlaGroup;
  constexpr bool kOwnScales = std::is_same_v<Cached, DsMla>;
  constexpr bool kScaled = sizeof(Latent) == 1 && !kOwnScales;

  const int lane = threadIdx.x % kWarp;
  const int64_t first_row = int64_t{blockIdx.x} * Shape::kBlockRows + threadIdx.x / kWarp * Shape::kRows;
  if (first_row >= p.rows) return;
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  const int64_t slot = find_slot<kSlotLanes>(p, first_row);
  const bool has_layer = layer >= 0 && layer < p.layers;
  const unsigned char* source = nullptr;
  if (has_layer && slot >= 0) {
    source = static_cast<const unsigned char*>(p.cache) + (layer * p.pages * p.page_size + slot) * Layout::kRowBytes;
  }
  const int row = lane / kRopeLanes, rope_group = lane % kRopeLanes;

  const unsigned char* sources[Shape::kRows];
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i) sources[i] = address_of_row<Shape::kRows>(source, i);
  GroupBits<Latent, kCount> latent[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const unsigned char* from = sources[Steps::row(step, lane)];
    if (from == nullptr) continue;
    latent[step] =
        load_group<Latent, kCount, /*kOnce=*/true>(from + Steps::group(step, lane) * kCount * sizeof(Latent));
  }
  GroupBits<Rope, kCount> rope;
  const bool has_rope = row < Shape::kRows;
  const unsigned char* const rope_source = address_of_row<Shape::kRows>(source, row % Shape::kRows);
  float scale = 1;  // or the one of the row's that this lane has
  if (has_rope && rope_source != nullptr) {
    rope =
        load_group<Rope, kCount, /*kOnce=*/true>(rope_source + Layout::kRopeByte + rope_group * kCount * sizeof(Rope));
  }
  if (kOwnScales && source != nullptr) {
    scale = read_only(reinterpret_cast<const float*>(source + kLatent) + lane % kScales);
  }
  if (kScaled && has_layer && p.k_scale != nullptr) scale = p.k_scale[p.k_scales > 1 ? layer : 0];

  auto* const latent_out = static_cast<Output*>(p.latent) + first_row * kLatent;
  auto* const rope_out = static_cast<Output*>(p.rope) + first_row * kRope;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int step_row = Steps::row(step, lane), group = Steps::group(step, lane);
    float step_scale = kScaled ? scale : 1;
    if constexpr (kOwnScales) {
      step_scale = __shfl_sync(kWholeWave, scale, step_row * kSlotLanes + group * kCount / kDsMlaGroup);
    }
    if (first_row + step_row >= p.rows) continue;
    GroupBits<Output, kCount> converted{};
    if (sources[step_row] != nullptr) converted = convert_group<Output>(latent[step], {step_scale});
    store_group(latent_out + step_row * kLatent + group * kCount, converted);
  }
  if (!has_rope || first_row + row >= p.rows) return;
  GroupBits<Output, kCount> converted{};
  if (rope_source != nullptr) converted = convert_group<Output>(rope, {kScaled ? scale : 1.0f});
  store_group(rope_out + row * kRope + rope_group * kCount, converted);
}

// By pieces of the output in their order, the rope key's behind the latent's of each row.
template <class Cached, class Output>
__device__ __forceinline__ void gather_by_pieces(const GatherContextParams& p) {
  using Shape = GatherShape<Cached, Output>;
  using Layout = CacheLayout<Cached>;
  using Latent = typename Layout::Latent;
  using Rope = typename Layout::Rope;
  constexpr int kCount = Shape::kCount, kPieces = JAX_MLA_GATHER_PIECES, kLatentGroups = kLatent / kCount;
  constexpr uint32_t kRowGroups = Shape::kRowGroups;
  constexpr int kMostRows = (kPieces * kWarp + kRowGroups - 2) / kRowGroups + 1;
  constexpr int kSlotLanes = kMostRows <= 2 ? kWarp / 2 : kWarp / 4;
  static_assert(kMostRows <= 4);
  constexpr bool kOwnScales = std::is_same_v<Cached, DsMla>;
  constexpr bool kScaled = sizeof(Latent) == 1 && !kOwnScales;

  const int lane = threadIdx.x % kWarp;
  const uint32_t first_piece = blockIdx.x * Shape::kBlockPieces + threadIdx.x / kWarp * (kPieces * kWarp);
  const uint32_t first_row = first_piece / kRowGroups, first_group = first_piece - first_row * kRowGroups;
  const auto rows = static_cast<uint32_t>(p.rows);
  if (first_row >= rows) return;
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  const int64_t slot = find_slot<kSlotLanes>(p, first_row);
  const bool has_layer = layer >= 0 && layer < p.layers;
  const unsigned char* source = nullptr;
  if (has_layer && slot >= 0) {
    source = static_cast<const unsigned char*>(p.cache) + (layer * p.pages * p.page_size + slot) * Layout::kRowBytes;
  }

  const unsigned char* from[kPieces];
  GroupBits<Latent, kCount> latent[kPieces];
  GroupBits<Rope, kCount> rope[kPieces];
  float scales[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const uint32_t piece = first_group + i * kWarp + lane, row = piece / kRowGroups, group = piece - row * kRowGroups;
    from[i] = shuffle_address(source, row * kSlotLanes);
    if (from[i] == nullptr) continue;
    if (std::is_same_v<Latent, Rope> || group < kLatentGroups) {
      latent[i] = load_group<Latent, kCount, /*kOnce=*/true>(from[i] + group * (kCount * sizeof(Latent)));
    } else {
      rope[i] = load_group<Rope, kCount, /*kOnce=*/true>(from[i] + Layout::kRopeByte +
                                                         (group - kLatentGroups) * (kCount * sizeof(Rope)));
    }
    if (kOwnScales && group < kLatentGroups) {
      scales[i] = read_only(reinterpret_cast<const float*>(from[i] + kLatent) + group * kCount / kDsMlaGroup);
    }
  }
  const float scale = kScaled && has_layer && p.k_scale != nullptr ? p.k_scale[p.k_scales > 1 ? layer : 0] : 1;
  auto* const latent_out = static_cast<Output*>(p.latent) + int64_t{first_row} * kLatent;
  auto* const rope_out = static_cast<Output*>(p.rope) + int64_t{first_row} * kRope;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const uint32_t piece = first_group + i * kWarp + lane, row = piece / kRowGroups, group = piece - row * kRowGroups;
    if (first_row + row >= rows) continue;
    GroupBits<Output, kCount> converted{};
    if (from[i] != nullptr) {
      if (std::is_same_v<Latent, Rope> || group < kLatentGroups) {
        converted = convert_group<Output>(latent[i], {kOwnScales ? scales[i] : kScaled ? scale : 1.0f});
      } else {
        converted = convert_group<Output>(rope[i], {1});
      }
    }
    Output* const target = group < kLatentGroups ? latent_out + row * kLatent + group * kCount
                                                 : rope_out + row * kRope + (group - kLatentGroups) * kCount;
    store_group(target, converted);
  }
}

template <class Cached, class Output>
__device__ __forceinline__ void gather_rows(const GatherContextParams& p) {
  if constexpr (GatherShape<Cached, Output>::kRows == 0) {
    gather_by_pieces<Cached, Output>(p);
  } else {
    gather_by_rows<Cached, Output>(p);
  }
}

}  // namespace mla
