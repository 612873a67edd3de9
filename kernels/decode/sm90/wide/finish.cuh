// The end of a wide tile: its sums, lse, and the normalised output to where it belongs.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/lanes.cuh"
#include "kernels/decode/sm90/wide/shape.h"
#include "kernels/decode/sm90/wide/weights.cuh"
#include "kernels/decode/work.cuh"

namespace mla::sm90::wide {

constexpr int kGroupColumns = kLatent / kGroups;  // of the output
constexpr int kProductGroups = kProductChunks * kChunkColumns / 8;

// Four words of each of the four lanes that differ in t, transposed: word s of lane t becomes word t of lane s.
__device__ __forceinline__ void transpose_over_t(uint32_t (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t received = __shfl_xor_sync(0xFFFFFFFF, upper ? words[i] : words[i | bit], bit);
      (upper ? words[i] : words[i | bit]) = received;
    }
  }
}

// One row of this lane's four, 16 bytes a lane: four neighbouring groups of eight columns are turned about, so that a
// lane has all eight columns of one.
template <class Element>
__device__ __forceinline__ void store_row(Element* target, bool exists, int e, float inverse, const Output& out) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kGroupColumns / 32; ++i) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int columns = 4 * i + j;  // eight
      const float* pair = out[columns / kProductGroups] + 4 * (columns % kProductGroups) + 2 * e;
      words[j] = pack<Element>(pair[0] * inverse, pair[1] * inverse);
    }
    transpose_over_t(words);
    if (exists) *reinterpret_cast<uint4*>(target + (4 * i + t) * 8) = {words[0], words[1], words[2], words[3]};
  }
}

// Of a partial: two columns a lane, and four lanes fill a sector.
__device__ __forceinline__ void store_partial_row(float* target, int e, float inverse, const Output& out) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kGroupColumns / 8; ++j) {
    const float* pair = out[j / kProductGroups] + 4 * (j % kProductGroups) + 2 * e;
    *reinterpret_cast<float2*>(target + j * 8 + 2 * t) = make_float2(pair[0] * inverse, pair[1] * inverse);
  }
}

// By both groups.
template <class Element, class Params>
__device__ __forceinline__ void finish_tile(const Params& p, const Tile& tile, int group, int row, const Rows& rows,
                                            const Output& out, Control& control) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float sum = combine_over_t(rows.sum[e], [](float a, float b) { return a + b; });
    if (t == 0) control.sums[group][row + 8 * e] = sum;
  }
  ptx::barrier_sync(kItemBarrier, kAttendThreads);
  const float sums[2] = {control.sums[0][row] + control.sums[1][row],
                         control.sums[0][row + 8] + control.sums[1][row + 8]};
  ptx::barrier_sync(kItemBarrier, kAttendThreads);  // both have read, before the next item's are written
  const bool direct = tile.partial < 0;
  const int64_t first_row = direct ? tile.first_row : partial_row(p, tile.partial, tile.first_row, kRows);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int tile_row = row + 8 * e;
    const bool exists = tile_row < tile.rows;
    const float sum = sums[e];
    const bool empty = sum == 0;  // no key was visible: what has the maximum weighs 1 or more
    float inverse = empty ? 0 : 1 / sum;
    if (exists && group == 0 && t == 0) {
      (direct ? p.lse : p.partial_lse)[first_row + tile_row] = empty ? -INFINITY : rows.reference[e] * kLn2 + logf(sum);
    }
    if (exists && !empty && direct) add_sink(p, tile, tile_row, sum, rows.reference[e], inverse);
    const int64_t start = (first_row + tile_row) * kLatent + group * kGroupColumns;
    if (direct) {
      store_row(static_cast<Element*>(p.out) + start, exists, e, inverse, out);
    } else if (exists) {
      store_partial_row(p.partial_out + start, e, inverse, out);
    }
  }
}

}  // namespace mla::sm90::wide
