// gather_context's kernel: rows of one chunk of cached context, from the pages where they lie into a workspace,
// dequantised.
//
// A warp has as many rows as fill its lanes with their rope keys, and waits for nobody: three loads behind one another
// lead to them (the requests' pieces, the page, the row), the first two of which lanes do for a row each. All groups of
// all rows are on their way before the first is stored.
#pragma once

#include "kernels/cache/generic/layout.cuh"
#include "kernels/cuda/rows.cuh"
#include "kernels/group.h"
#include "kernels/params.h"

namespace mla {

constexpr int kGatherThreads = 128;

// Variants to be timed: rows of a warp (1, 2, or 4, which is as said above); and what is done about the second of the
// three loads while the first is waited for. 0: nothing; 1: the page table is brought to the L2; 2: what the page would
// be if pieces filled their rows of the table is loaded, and taken where that was right.
#if !defined(MLA_GATHER_ROWS)
#define MLA_GATHER_ROWS 4
#endif
#if !defined(MLA_GATHER_EARLY)
#define MLA_GATHER_EARLY 0
#endif

template <class Cached, class Output>
struct GatherShape {
  using Layout = CacheLayout<Cached>;
  static constexpr int kCount = kWidestGroup<typename Layout::Latent, Output>;
  using LatentSteps = RowSteps<kLatent / kCount>;
  using RopeSteps = RowSteps<kRope / kCount>;
  static constexpr int kLatentSteps = LatentSteps::kStepsARow;  // a row
  static constexpr int kRows = RopeSteps::kRowsAStep < MLA_GATHER_ROWS ? RopeSteps::kRowsAStep : MLA_GATHER_ROWS;
  static constexpr int kBlockRows = kGatherThreads / kWarp * kRows;
  static_assert(LatentSteps::kRowsAStep == 1 && RopeSteps::kStepsARow == 1);
};

// The slot of row first + lane % kRows of the workspace, or -1.
template <int kRows>
__device__ __forceinline__ int64_t find_slot(const GatherContextParams& p, int64_t first) {
  const int lane = threadIdx.x % kWarp, own = lane % kRows;
  const int64_t w = first + own;
  const int64_t entries = int64_t{p.batch} * p.max_pages;
  int64_t guess = -1;
  int32_t guessed = -1;
  if (MLA_GATHER_EARLY == 1 && lane == 0 && entries > 0) {
    const auto line = static_cast<uint32_t>(first / kRows * kWarp);
    ptx::prefetch(p.page_table + (entries < INT32_MAX ? line % static_cast<uint32_t>(entries) : 0));
  }
  if (MLA_GATHER_EARLY == 2) {
    guess = static_cast<uint32_t>(w) / static_cast<uint32_t>(p.page_size);
    if (guess < entries) guessed = ptx::load_now(p.page_table + guess);
  }
  int32_t request = -1, begin = 0, start = 0;  // of the first piece that ends behind w
  for (int32_t base = 0; base < p.batch && any_lane(request < 0); base += kWarp) {
    const int32_t candidate = base + lane;
    const bool exists = candidate < p.batch;
    const int32_t its_begin = exists ? p.cu_kv_lens[candidate] : 0, its_end = exists ? p.cu_kv_lens[candidate + 1] : 0,
                  its_start = exists ? p.starts[candidate] : 0;
    LaneMask ends_behind = 0;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const LaneMask lanes = ballot(exists && its_end > first + row);
      if (row == own) ends_behind = lanes;
    }
    const bool is_new = request < 0 && ends_behind != 0;
    const int found = is_new ? first_lane(ends_behind) : lane;
    const int32_t found_begin = __shfl_sync(kWholeWave, its_begin, found),
                  found_start = __shfl_sync(kWholeWave, its_start, found);
    if (!is_new) continue;
    request = base + found;
    begin = found_begin;
    start = found_start;
  }
  const int64_t token = start + (w - begin);
  if (request < 0 || w < begin || token < 0 || token > INT32_MAX) return -1;
  const auto page_of_request = static_cast<uint32_t>(token) / static_cast<uint32_t>(p.page_size);
  if (page_of_request >= static_cast<uint32_t>(p.max_pages)) return -1;
  const int64_t entry = int64_t{request} * p.max_pages + page_of_request;
  const int32_t page = MLA_GATHER_EARLY == 2 && entry == guess ? guessed : p.page_table[entry];
  if (page < 0 || page >= p.pages) return -1;
  return int64_t{page} * p.page_size + (static_cast<uint32_t>(token) - page_of_request * p.page_size);
}

// Another lane's address.
__device__ __forceinline__ const unsigned char* shuffle(const unsigned char* address, int source) {
  const auto bits = reinterpret_cast<uintptr_t>(address);
  const uint32_t low = __shfl_sync(kWholeWave, static_cast<uint32_t>(bits), source),
                 high = __shfl_sync(kWholeWave, static_cast<uint32_t>(bits >> 32), source);
  return reinterpret_cast<const unsigned char*>(uintptr_t{high} << 32 | low);
}

template <class Cached, class Output>
__device__ __forceinline__ void gather_rows(const GatherContextParams& p) {
  using Shape = GatherShape<Cached, Output>;
  using Layout = typename Shape::Layout;
  using Latent = typename Layout::Latent;
  using Rope = typename Layout::Rope;
  using LatentSteps = typename Shape::LatentSteps;
  using RopeSteps = typename Shape::RopeSteps;
  constexpr int kCount = Shape::kCount, kRows = Shape::kRows, kSteps = Shape::kLatentSteps;
  constexpr int kScales = kLatent / kDsMlaGroup;
  constexpr bool kOwnScales = std::is_same_v<Cached, DsMla>;
  constexpr bool kScaled = sizeof(Latent) == 1 && !kOwnScales;

  const int lane = threadIdx.x % kWarp;
  const int64_t warp = int64_t{blockIdx.x} * (kGatherThreads / kWarp) + threadIdx.x / kWarp, first = warp * kRows;
  if (first >= p.rows) return;
  const int64_t rows_left = p.rows - first;
  const int left = rows_left < kRows ? static_cast<int>(rows_left) : kRows;
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  const bool has_layer = layer >= 0 && layer < p.layers;
  const int64_t slot = find_slot<kRows>(p, first);
  const unsigned char* own_row = nullptr;  // of row lane % kRows
  if (has_layer && slot >= 0 && lane % kRows < left) {
    own_row = static_cast<const unsigned char*>(p.cache) + (layer * p.pages * p.page_size + slot) * Layout::kRowBytes;
  }

  GroupBits<Latent, kCount> latent[kRows][kSteps];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const unsigned char* const source = shuffle(own_row, row);
    if (source == nullptr) continue;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      latent[row][step] = load_group<Latent, kCount>(source + LatentSteps::group(step, lane) * kCount * sizeof(Latent));
    }
  }
  const int rope_row = RopeSteps::row(0, lane), rope_column = RopeSteps::group(0, lane) * kCount;
  const bool has_rope = rope_row < left;
  const unsigned char* const rope_source = shuffle(own_row, rope_row % kRows);
  GroupBits<Rope, kCount> rope;
  if (has_rope && rope_source != nullptr) {
    rope = load_group<Rope, kCount>(rope_source + Layout::kRopeByte + rope_column * sizeof(Rope));
  }
  float scale = 1;  // or, of the rows' own, one in each lane
  if (kOwnScales) {
    const unsigned char* const source = shuffle(own_row, lane / kScales % kRows);
    if (source != nullptr) scale = read_only(reinterpret_cast<const float*>(source + kLatent) + lane % kScales);
  }
  if (kScaled && has_layer && p.k_scale != nullptr) scale = p.k_scale[p.k_scales > 1 ? layer : 0];

  auto* const latent_out = static_cast<Output*>(p.latent) + first * kLatent;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const bool is_there = shuffle(own_row, row) != nullptr;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int column = LatentSteps::group(step, lane) * kCount;
      const float step_scale =
          kOwnScales ? __shfl_sync(kWholeWave, scale, row * kScales + column / kDsMlaGroup) : scale;
      GroupBits<Output, kCount> converted{};
      if (is_there) converted = convert_group<Output>(latent[row][step], {step_scale});
      if (row < left) store_group(latent_out + row * kLatent + column, converted);
    }
  }
  if (!has_rope) return;
  GroupBits<Output, kCount> converted{};
  if (rope_source != nullptr) converted = convert_group<Output>(rope, {kScaled ? scale : 1.0f});
  store_group(static_cast<Output*>(p.rope) + (first + rope_row) * kRope + rope_column, converted);
}

}  // namespace mla
