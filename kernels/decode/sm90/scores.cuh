// The score warps: S^T = K Q^T for each block, online softmax over its tokens, weights P^T for the output warps. Two
// groups take the blocks in turn, so that one multiplies while the other weighs.
//
// Tokens are the rows of S^T, (query, head) rows its columns. Lane 4 * g + t of warp w has the scores of tokens
// 16w + g and 16w + g + 8 with the rows 8j + 2t and 8j + 2t + 1, in score[4j .. 4j+3] as wgmma.cuh says; of what it
// keeps a row, [2j] and [2j + 1] belong to those two.
#pragma once

#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/decode/sm90/clear.cuh"
#include "kernels/decode/sm90/products.cuh"
#include "kernels/decode/sm90/shape.h"
#include "kernels/decode/softmax.h"
#include "kernels/decode/work.cuh"

namespace mla::sm90 {

// Sums of weights, over this lane's tokens alone.
template <class Shape>
using Sums = float[Shape::kRows / 4];

// What this lane's two rows of group j have in an array with an element a row.
template <class T>
__device__ __forceinline__ auto row_pair(T* of_rows, int j) {
  using Pair = std::conditional_t<std::is_same_v<std::remove_const_t<T>, float>, float2, int2>;
  return *reinterpret_cast<const Pair*>(of_rows + j * 8 + 2 * (threadIdx.x % 4));
}

// -inf where a row does not see a token. `first_token`: of the block.
template <class Shape>
__device__ __forceinline__ void mask_scores(const int32_t* visible_end, int32_t first_token, bool page_valid,
                                            Scores<Shape>& score) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kGroupWarps;
  const int32_t token = warp * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    const int2 end = row_pair(visible_end, j);
    const int32_t visible[2] = {page_valid ? end.x - first_token : 0, page_valid ? end.y - first_token : 0};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (token >= visible[e]) score[4 * j + e] = -INFINITY;
      if (token + 8 >= visible[e]) score[4 * j + 2 + e] = -INFINITY;
    }
  }
}

// Scores become relative to the references, where there are any. True: one has outgrown its row's by `slack`.
template <class Shape>
__device__ __forceinline__ bool subtract_references(float slack, const float* references, Scores<Shape>& score) {
  float highest = -INFINITY;
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    float2 reference = row_pair(references, j);
    if (reference.x == -INFINITY) reference.x = 0;
    if (reference.y == -INFINITY) reference.y = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      score[4 * j + e] -= e % 2 == 0 ? reference.x : reference.y;
      highest = fmaxf(highest, score[4 * j + e]);
    }
  }
  return highest > slack;
}

// Moves the references of rows that have seen no key before, or whose scores have outgrown them. The slow way, which is
// the way of an item's first block and of few others; whether a row takes it depends on that row alone. `fresh`: this
// is the item's first block. Returns kRescale and kUnset as they apply. By the
// warps of one group at a time.
template <class Shape>
__device__ __forceinline__ uint32_t move_references(float slack, bool fresh, int32_t rows, int group,
                                                    Scores<Shape>& score, Control<Shape>& control) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, thread = threadIdx.x % kGroupThreads;
  const int warp = thread / 32;
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    float2 highest;
    highest.x = combine_over_g(fmaxf(score[4 * j], score[4 * j + 2]), fmaxf);
    highest.y = combine_over_g(fmaxf(score[4 * j + 1], score[4 * j + 3]), fmaxf);
    if (g == 0) *reinterpret_cast<float2*>(&control.highest[warp][j * 8 + 2 * t]) = highest;
  }
  ptx::barrier_sync(kGroupBarrier + group, kGroupThreads);
  bool rescaled = false, unset = false;
  if (thread < Shape::kRows) {
    float highest = -INFINITY;
#pragma unroll
    for (int w = 0; w < kGroupWarps; ++w) highest = fmaxf(highest, control.highest[w][thread]);
    const float reference = fresh ? -INFINITY : control.references[thread];
    const bool first = reference == -INFINITY;
    const bool moves = highest > (first ? -INFINITY : slack);
    const float moved = moves ? highest : 0;
    control.references[thread] = first ? (moves ? highest : -INFINITY) : reference + moved;
    control.moved[thread] = moved;
    control.rescale[group][thread] = first ? 1 : ptx::exp2_approximate(-moved);
    rescaled = moves && !first;
    unset = first && !moves && thread < rows;
  }
  rescaled = ptx::barrier_any(kGroupBarrier + group, kGroupThreads, rescaled);
  unset = ptx::barrier_any(kGroupBarrier + group, kGroupThreads, unset);
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    const float2 moved = row_pair(control.moved, j);
#pragma unroll
    for (int e = 0; e < 4; ++e) score[4 * j + e] -= e % 2 == 0 ? moved.x : moved.y;
  }
  return (rescaled ? kRescale : 0u) | (unset ? kUnset : 0u);
}

template <class Shape>
__device__ __forceinline__ void rescale_sums(const float* rescale, Sums<Shape>& sums) {
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    const float2 factor = row_pair(rescale, j);
    sums[2 * j] *= factor.x;
    sums[2 * j + 1] *= factor.y;
  }
}

// P^T of the block, a line of 64 tokens for each row, as the B operand of the output's product.
template <class Element, class Shape>
__device__ __forceinline__ void write_weights(const Scores<Shape>& score, uint32_t weights, Sums<Shape>& sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kGroupWarps;
  // stmatrix: lanes 0-7 address the rows' first eight tokens of this warp, lanes 8-15 the next eight.
  const int row = lane % 8, chunk = 2 * warp + lane / 8 % 2;
  const uint32_t target = weights + row * kLineBytes + ((chunk ^ row) << 4);
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    float weight[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) weight[e] = ptx::exp2_approximate(score[4 * j + e]);
    sums[2 * j] += weight[0] + weight[2];
    sums[2 * j + 1] += weight[1] + weight[3];
    ptx::stmatrix_x2_trans(target + j * 8 * kLineBytes, pack<Element>(weight[0], weight[1]),
                           pack<Element>(weight[2], weight[3]));
  }
}

// The item's end, by all score warps: the sums over all tokens, lse to where it belongs, and the normalisation for the
// output warps. The group that did not have the last block has its message still to heed.
template <class Shape, class Params>
__device__ __forceinline__ void finish_tile(const Params& p, const Tile& tile, int group, int last_group,
                                            Sums<Shape>& sums, uint32_t parity, Control<Shape>& control) {
  constexpr int kScoreThreads = Shape::kScoreGroups * kGroupThreads;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, thread = threadIdx.x, warp = thread / 32;
  ptx::barrier_sync(kItemBarrier, kScoreThreads);
  if (group != last_group && (control.messages[last_group] & kRescale)) {
    rescale_sums<Shape>(control.rescale[last_group], sums);
  }
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    float2 sum;
    sum.x = combine_over_g(sums[2 * j], [](float a, float b) { return a + b; });
    sum.y = combine_over_g(sums[2 * j + 1], [](float a, float b) { return a + b; });
    if (g == 0) *reinterpret_cast<float2*>(&control.sums[warp][j * 8 + 2 * t]) = sum;
  }
  // Read before the other group may go on to the next item.
  const float reference = thread < Shape::kRows ? control.references[thread] : 0;
  ptx::barrier_sync(kItemBarrier, kScoreThreads);
  if (thread >= kGroupThreads) return;
  ptx::mbarrier_wait(ptx::shared_address(&control.sums_empty), parity ^ 1);
  if (thread == 0) control.finished = tile;
  const bool direct = tile.partial < 0;
  float sum = 0;
  if (thread < Shape::kRows) {
#pragma unroll
    for (int w = 0; w < Shape::kScoreWarps; ++w) sum += control.sums[w][thread];
    float inverse = sum == 0 ? 0 : 1 / sum;  // 0: no key was visible, since what has the maximum weighs 1 or more
    if (sum != 0 && direct && thread < tile.rows) add_sink(p, tile, thread, sum, reference, inverse);
    control.inverse[thread] = inverse;
  }
  // The output waits for that, and not for what follows.
  ptx::mbarrier_arrive_warp(ptx::shared_address(&control.sums_full));
  if (thread < min_of(tile.rows, Shape::kRows)) {
    const int64_t first_row = direct ? tile.first_row : partial_row(p, tile.partial, tile.first_row, Shape::kRows);
    (direct ? p.lse : p.partial_lse)[first_row + thread] = sum == 0 ? -INFINITY : reference * kLn2 + logf(sum);
  }
}

template <class Element, class Params, class Shape>
__device__ __forceinline__ void score_tiles(const Params& p, uint32_t ring, uint32_t queries_address,
                                            Control<Shape>& control) {
  constexpr int kTurnThreads = 2 * kGroupThreads;
  const int thread = threadIdx.x % kGroupThreads;
  const int group = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / kGroupThreads, 0), other = group ^ 1;
  const int warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0);
  const uint32_t full = ptx::shared_address(control.full);
  const uint32_t weights_full = ptx::shared_address(control.weights_full);
  const uint32_t query_empty = ptx::shared_address(&control.query_empty);
  const uint32_t queries = ptx::matrix_operand(queries_address);
  const float scale = p.scale * kLog2E;
  const int page_of_warp = page_in_block(p, warp * 16);
  Ring<Shape> start;  // of the next item
  int turn = 0;       // the group of its first block
  uint32_t item_parity = 0;

  for (;; item_parity ^= 1) {
    ptx::mbarrier_wait(ptx::shared_address(&control.query_full), item_parity);
    const Tile& tile = control.queries[item_parity].tile;  // stays there until this item is finished
    if (tile.rows == 0) break;
    const int32_t* visible_end = control.queries[item_parity].visible_end;
    // Blocks of which all rows see all tokens: the first row belongs to the first query.
    const int32_t whole_blocks = (visible_end[0] - tile.kv_begin) / kBlockTokens;
    Sums<Shape> sums = {};
    const int32_t blocks = block_count(tile);
    bool unset = true;  // some row has not seen a key yet

    int32_t block = group ^ turn;
    Ring<Shape> position = start;
    position.skip(block);
    if (block >= blocks) {
      ptx::mbarrier_arrive_warp(query_empty);  // all lanes have read the item
    }
    for (; block < blocks; block += Shape::kScoreGroups) {
      const Ring<Shape> block_start = position;
      Scores<Shape> score;
      const uint32_t weights = score_block<Element>(p, ring, queries, full, position, score);
      position.skip(1);
      if (block + Shape::kScoreGroups >= blocks) ptx::mbarrier_arrive_warp(query_empty);
#pragma unroll
      for (int i = 0; i < Shape::kRows / 2; ++i) score[i] *= scale;
      const bool page_valid = control.valid_pages[block_start.slot] >> page_of_warp & 1;
      if (!page_valid || block >= whole_blocks) {
        mask_scores<Shape>(visible_end, tile.kv_begin + block * kBlockTokens, page_valid, score);
      }

      bool outgrown = false;
      if (block > 0) {
        ptx::barrier_sync(kTurnBarrier + group, kTurnThreads);
        const uint32_t before = control.messages[other];
        if (before & kRescale) rescale_sums<Shape>(control.rescale[other], sums);
        unset = before & kUnset;
        outgrown = subtract_references<Shape>(kReferenceSlack<Params>, control.references, score);
      }
      uint32_t message = 0;
      // The barrier also shows that all of the group have read the keys, so that the weights may replace them.
      if (ptx::barrier_any(kGroupBarrier + group, kGroupThreads, outgrown || unset)) {
        message = move_references(kReferenceSlack<Params>, /*fresh=*/block == 0, tile.rows, group, score, control);
        if (message & kRescale) rescale_sums<Shape>(control.rescale[group], sums);
      }
      if (block + 1 == blocks) message |= kLast;
      if (thread == 0) control.messages[group] = message;
      if (block + 1 < blocks) ptx::barrier_arrive(kTurnBarrier + other, kTurnThreads);

      write_weights<Element, Shape>(score, weights, sums);
      if (block >= whole_blocks) {
        const int32_t first_token = tile.kv_begin + block * kBlockTokens;
        clear_values<Element>(ring, block_start, visible_end[0] - first_token, tile.kv_end - first_token);
      }
      ptx::fence_async_proxy();
      ptx::mbarrier_arrive_warp(weights_full + group * 8);
    }
    start.skip(blocks);
    turn = (turn + blocks) % 2;
    finish_tile<Shape>(p, tile, group, /*last_group=*/turn ^ 1, sums, item_parity, control);
  }

  // When the output warps have taken the last item's sums, they have read all messages.
  if (group != turn) return;
  ptx::mbarrier_wait(ptx::shared_address(&control.sums_empty), item_parity ^ 1);
  if (thread == 0) control.messages[group] = kStop;
  ptx::mbarrier_arrive_warp(weights_full + group * 8);
}

}  // namespace mla::sm90
