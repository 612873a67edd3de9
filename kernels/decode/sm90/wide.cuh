// Wide tiles, of 64 rows: S = Q K^T and O += P V, with the (query, head) rows on the side of the instruction that is 64
// wide. Two warpgroups work on two blocks at a time. Each has the scores of one of them, and half of the columns of the
// output for both: what one writes as weights both read.
//
// Lane 4 * g + t of a group's warp w has rows 16w + g and 16w + g + 8; of the scores tokens 8j + 2t and 8j + 2t + 1, in
// score[4j], score[4j + 1] for the upper row and score[4j + 2], score[4j + 3] for the lower one; of the output likewise
// the columns.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/wgmma_wide.cuh"
#include "kernels/decode/sm90/clear.cuh"
#include "kernels/decode/sm90/products.cuh"
#include "kernels/decode/sm90/shape.h"
#include "kernels/decode/softmax.h"

namespace mla::sm90 {

constexpr int kWideThreads = 2 * kGroupThreads;
constexpr int kWideColumns = kLatent / 2;  // of the output, a group
using WideOutput = float[kWideColumns / 2];

// A lane's two rows.
struct WideRows {
  float reference[2] = {-INFINITY, -INFINITY};  // of the exponents, in base 2; the same in both groups
  float sum[2] = {0, 0};                        // of the weights, over this lane's tokens alone
};

// -inf where a row does not see a token. `visible`: how many of the block's tokens each row sees. `pages`: a bit for
// each page of the block; a page is 8 << page_shift tokens.
template <class Shape>
__device__ __forceinline__ void mask_wide(const int32_t (&visible)[2], uint32_t pages, int page_shift,
                                          Scores<Shape>& score) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kBlockTokens / 8; ++j) {
    const bool valid = pages >> (j >> page_shift) & 1;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!valid || j * 8 + 2 * t + e % 2 >= visible[e / 2]) score[4 * j + e] = -INFINITY;
    }
  }
}

// Scores become relative to the references, where there are any. True: one has outgrown its row's by kSlack.
template <class Shape>
__device__ __forceinline__ bool subtract_references(const WideRows& rows, Scores<Shape>& score) {
  float highest = -INFINITY;
  float reference[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) reference[e] = rows.reference[e] == -INFINITY ? 0 : rows.reference[e];
#pragma unroll
  for (int i = 0; i < kBlockTokens / 2; ++i) {
    score[i] -= reference[i % 4 / 2];
    highest = fmaxf(highest, score[i]);
  }
  return highest > kSlack;
}

// As move_references of scores.cuh, but over two blocks at once, and what has to be rescaled is this lane's own.
template <class Shape>
__device__ __forceinline__ void move_references(bool has_block, int group, int row, Scores<Shape>& score,
                                                WideRows& rows, WideOutput& out, Control<Shape>& control) {
  float highest[2] = {-INFINITY, -INFINITY};
  if (has_block) {
#pragma unroll
    for (int i = 0; i < kBlockTokens / 2; ++i) highest[i % 4 / 2] = fmaxf(highest[i % 4 / 2], score[i]);
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    highest[e] = combine_over_t(highest[e], fmaxf);
    if (threadIdx.x % 4 == 0) control.highest[group][row + 8 * e] = highest[e];
  }
  ptx::barrier_sync(kItemBarrier, kWideThreads);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    highest[e] = fmaxf(highest[e], control.highest[group ^ 1][row + 8 * e]);
    const bool first = rows.reference[e] == -INFINITY;
    const bool moves = highest[e] > (first ? -INFINITY : kSlack);
    const float moved = moves ? highest[e] : 0;
    rows.reference[e] = first ? (moves ? moved : -INFINITY) : rows.reference[e] + moved;
    const float factor = first ? 1 : ptx::exp2_approximate(-moved);
    rows.sum[e] *= factor;
#pragma unroll
    for (int j = 0; j < kWideColumns / 8; ++j) {
      out[4 * j + 2 * e] *= factor;
      out[4 * j + 2 * e + 1] *= factor;
    }
#pragma unroll
    for (int j = 0; j < kBlockTokens / 8; ++j) {
      score[4 * j + 2 * e] -= moved;
      score[4 * j + 2 * e + 1] -= moved;
    }
  }
}

// P of the block, a line of 64 tokens for each row, as the A operand of the output's product.
template <class Element, class Shape>
__device__ __forceinline__ void write_weights(const Scores<Shape>& score, uint32_t weights, WideRows& rows) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kGroupWarps;
  // stmatrix: lanes 8i .. 8i+7 address the lines of matrix i: upper rows, lower rows; then eight tokens on.
  const int line = warp * 16 + lane / 8 % 2 * 8 + lane % 8, chunk = lane / 16;
#pragma unroll
  for (int k = 0; k < kBlockTokens / 16; ++k) {
    uint32_t matrices[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = 2 * k + i / 2, e = i % 2;
      const float first = ptx::exp2_approximate(score[4 * j + 2 * e]);
      const float second = ptx::exp2_approximate(score[4 * j + 2 * e + 1]);
      rows.sum[e] += first + second;
      matrices[i] = pack<Element>(first, second);
    }
    ptx::stmatrix_x4(weights + line * kLineBytes + (((2 * k + chunk) ^ (lane % 8)) << 4), matrices);
  }
}

// The part of a block in the output: all of its weights, this group's columns of its values. Committed, not waited for.
template <class Element>
__device__ __forceinline__ void accumulate_wide(uint32_t block, int group, WideOutput& out) {
  const uint32_t weights = ptx::matrix_operand(block + kLatentChunks * kChunkBytes);
  const uint32_t values = ptx::wide_operand<kChunkBytes>(block + group * (kLatentChunks / 2) * kChunkBytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kBlockTokens / 16; ++k) {
    ptx::wgmma_wide<Element>(out, weights + k * 32 / 16, values + k * 16 * kLineBytes / 16);
  }
  ptx::wgmma_commit();
}

// By both groups: the sums over all tokens, lse, and the normalised output to where it belongs.
template <class Element, class Shape>
__device__ __forceinline__ void finish_wide(const DecodeParams& p, const Tile& tile, int group, int row, WideRows& rows,
                                            const WideOutput& out, Control<Shape>& control) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float sum = combine_over_t(rows.sum[e], [](float a, float b) { return a + b; });
    if (t == 0) control.sums[group][row + 8 * e] = sum;
  }
  ptx::barrier_sync(kItemBarrier, kWideThreads);
  const bool direct = tile.partial < 0;
  const int64_t first_row = direct ? tile.first_row : int64_t{tile.partial} * Shape::kRows;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int tile_row = row + 8 * e;
    if (tile_row >= tile.rows) continue;
    const float sum = control.sums[0][tile_row] + control.sums[1][tile_row];
    const bool empty = sum == 0;  // no key was visible: what has the maximum weighs 1 or more
    const float inverse = empty ? 0 : 1 / sum;
    if (group == 0 && t == 0) {
      (direct ? p.lse : p.partial_lse)[first_row + tile_row] = empty ? -INFINITY : rows.reference[e] * kLn2 + logf(sum);
    }
    const int64_t start = (first_row + tile_row) * kLatent + group * kWideColumns + 2 * t;
#pragma unroll
    for (int j = 0; j < kWideColumns / 8; ++j) {
      const float first = out[4 * j + 2 * e] * inverse, second = out[4 * j + 2 * e + 1] * inverse;
      if (direct) {
        *reinterpret_cast<uint32_t*>(static_cast<Element*>(p.out) + start + j * 8) = pack<Element>(first, second);
      } else {
        *reinterpret_cast<float2*>(p.partial_out + start + j * 8) = make_float2(first, second);
      }
    }
  }
}

template <class Element, class Shape>
__device__ __forceinline__ void attend_tiles(const DecodeParams& p, uint32_t ring, uint32_t queries_address,
                                             Control<Shape>& control) {
  static_assert(Shape::kRows == kBlockTokens && Shape::kSlots % kBlockSlots == 0, "blocks lie in one piece");
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32 % kGroupWarps, 0);
  const int group = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  const int row = warp * 16 + lane / 4;
  const uint32_t full = ptx::shared_address(control.full), empty = ptx::shared_address(control.empty);
  const uint32_t queries = ptx::matrix_operand(queries_address);
  const float scale = p.scale * kLog2E;
  const int page_shift = p.page_size < kBlockTokens ? 31 - __clz(p.page_size) - 3 : 3;
  Ring<Shape> position;

  for (uint32_t item_parity = 0;; item_parity ^= 1) {
    ptx::mbarrier_wait(ptx::shared_address(&control.query_full), item_parity);
    const Tile& tile = control.queries[item_parity].tile;  // stays there until this item is finished
    if (tile.rows == 0) break;
    const int32_t* visible_end = control.queries[item_parity].visible_end;
    // Blocks of which all rows see all tokens: the first row belongs to the first query.
    const int32_t whole_blocks = (visible_end[0] - tile.kv_begin) / kBlockTokens;
    const int32_t blocks = block_count(tile);
    WideRows rows;
    WideOutput out = {};

    for (int32_t block = 0; block < blocks; block += 2) {
      Ring<Shape> second = position;
      second.skip(1);
      const int32_t own = block + group;
      const bool has_block = own < blocks;
      const Ring<Shape> start = group == 0 ? position : second;
      Scores<Shape> score;
      bool flag = false;
      uint32_t weights = 0;
      if (has_block) {
        Ring<Shape> reading = start;
        weights = score_block<Element>(ring, queries, full, reading, score);
#pragma unroll
        for (int i = 0; i < kBlockTokens / 2; ++i) score[i] *= scale;
        const uint32_t pages = control.valid_pages[start.slot];
        if (pages != 0xFFFFFFFF || own >= whole_blocks) {
          const int32_t first_token = tile.kv_begin + own * kBlockTokens;
          mask_wide<Shape>({visible_end[row] - first_token, visible_end[row + 8] - first_token}, pages, page_shift,
                           score);
        }
        flag = subtract_references<Shape>(rows, score);
      }
      if (block + 2 >= blocks) {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&control.query_empty));
      }
      flag = flag || (rows.reference[0] == -INFINITY && row < tile.rows) ||
             (rows.reference[1] == -INFINITY && row + 8 < tile.rows);
      // The barrier also shows that all have read the keys, so that the weights may replace them.
      if (ptx::barrier_any(kItemBarrier, kWideThreads, flag)) {
        move_references(has_block, group, row, score, rows, out, control);
      }
      if (has_block) {
        write_weights<Element, Shape>(score, weights, rows);
        if (own >= whole_blocks) {
          const int32_t first_token = tile.kv_begin + own * kBlockTokens;
          clear_values<Element>(ring, start, visible_end[0] - first_token, tile.kv_end - first_token);
        }
        ptx::fence_async_proxy();
      }
      ptx::barrier_sync(kItemBarrier, kWideThreads);  // the weights of both blocks are there

      const bool pair = block + 1 < blocks;
      accumulate_wide<Element>(ring + position.slot * kSlotBytes, group, out);
      if (pair) {
        accumulate_wide<Element>(ring + second.slot * kSlotBytes, group, out);
        ptx::wgmma_wait<1>();
        if (lane < kBlockSlots) ptx::mbarrier_arrive(empty + (position.slot + lane) * 8);
        ptx::wgmma_wait<0>();
        if (lane < kBlockSlots) ptx::mbarrier_arrive(empty + (second.slot + lane) * 8);
        position = second;
      } else {
        ptx::wgmma_wait<0>();
        if (lane < kBlockSlots) ptx::mbarrier_arrive(empty + (position.slot + lane) * 8);
      }
      position.skip(1);
    }
    finish_wide<Element>(p, tile, group, row, rows, out, control);
  }
}

}  // namespace mla::sm90
