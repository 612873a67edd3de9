// The score warps: S^T = K Q^T for each block, online softmax over its tokens, weights P^T for the output warps. Where
// there are two groups of them they take the blocks in turn, so that one multiplies while the other weighs.
//
// Tokens are the rows of S^T, (query, head) rows its columns. Lane 4 * g + t of warp w has the scores of tokens
// 16w + g and 16w + g + 8 with the rows 8j + 2t and 8j + 2t + 1, in score[4j .. 4j+3] as wgmma.cuh says; of what it
// keeps a row, [2j] and [2j + 1] belong to those two.
#pragma once

#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/decode/sm90/shape.h"
#include "kernels/decode/softmax.h"

namespace mla::sm90 {

template <class Shape>
using Scores = float[Shape::kRows / 2];

// Sums of weights, over this lane's tokens alone.
template <class Shape>
using Sums = float[Shape::kRows / 4];

// Combines values of lanes that differ in g.
template <class Combine>
__device__ __forceinline__ float over_tokens(float value, Combine combine) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    value = combine(value, __shfl_xor_sync(0xFFFFFFFF, value, distance));
  }
  return value;
}

// What this lane's two rows of group j have in an array with an element a row.
template <class T>
__device__ __forceinline__ auto row_pair(T* of_rows, int j) {
  using Pair = std::conditional_t<std::is_same_v<std::remove_const_t<T>, float>, float2, int2>;
  return *reinterpret_cast<const Pair*>(of_rows + j * 8 + 2 * (threadIdx.x % 4));
}

// Waits for a block's slots in turn and multiplies it with the queries. Returns where its rope keys lie, which the
// weights will replace.
template <class Element, class Shape>
__device__ __forceinline__ uint32_t score_block(uint32_t ring, uint32_t queries, uint32_t full, Ring<Shape>& position,
                                                Scores<Shape>& score) {
  uint32_t rope = 0;
#pragma unroll
  for (int i = 0; i < kBlockSlots; ++i) {
    ptx::mbarrier_wait(full + position.slot * 8, position.parity);
    const uint32_t slot = ring + position.slot * kSlotBytes;
    const uint32_t keys = ptx::matrix_operand(slot);
    ptx::wgmma_fence();  // after every wait, else the products are run one by one
#pragma unroll
    for (int c = 0; c < kSlotChunks; ++c) {
#pragma unroll
      for (int k = 0; k < kChunkColumns / 16; ++k) {
        ptx::wgmma<Element, /*kTransposed=*/false>(
            score, keys + (c * kChunkBytes + k * 32) / 16,
            queries + ((i * kSlotChunks + c) * Shape::kQueryChunkBytes + k * 32) / 16, (i | c | k) != 0);
      }
    }
    rope = slot + (kSlotChunks - 1) * kChunkBytes;
    position.advance();
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  return rope;
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

// Scores become relative to the references, where there are any. True: one has outgrown its row's by kSlack.
template <class Shape>
__device__ __forceinline__ bool subtract_references(const float* references, Scores<Shape>& score) {
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
  return highest > kSlack;
}

// Moves the references of rows that have seen no key before, or whose scores have outgrown them. The slow way, which is
// the way of an item's first block and of few others; whether a row takes it depends on that row alone. `fresh`: this
// is the item's first block. Returns kRescale and kUnset as they apply. By the
// warps of one group at a time.
template <class Shape>
__device__ __forceinline__ uint32_t move_references(bool fresh, int32_t rows, int group, int buffer,
                                                    Scores<Shape>& score, Control<Shape>& control) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, thread = threadIdx.x % kGroupThreads;
  const int warp = thread / 32;
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    float2 highest;
    highest.x = over_tokens(fmaxf(score[4 * j], score[4 * j + 2]), fmaxf);
    highest.y = over_tokens(fmaxf(score[4 * j + 1], score[4 * j + 3]), fmaxf);
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
    const bool moves = highest > (first ? -INFINITY : kSlack);
    const float moved = moves ? highest : 0;
    control.references[thread] = first ? (moves ? highest : -INFINITY) : reference + moved;
    control.moved[thread] = moved;
    control.rescale[buffer][thread] = first ? 1 : ptx::exp2_approximate(-moved);
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

// Two elements; those that are infinite or NaN become 0.
template <class Element>
__device__ __forceinline__ uint32_t finite(uint32_t pair) {
  constexpr uint32_t kExponent = std::is_same_v<Element, __half> ? 0x7C00 : 0x7F80;
  if ((pair & kExponent) == kExponent) pair &= 0xFFFF0000;
  if ((pair & kExponent << 16) == kExponent << 16) pair &= 0xFFFF;
  return pair;
}

// Values that a weight of 0 would not silence. Tokens from `unused` on may be NaN: zeros. Those from `hidden` on are
// not seen by all rows: zeros for what is not finite. (A row that sees such a token has a NaN among its scores, and so
// in its sum of weights.)
template <class Element, class Shape>
__device__ __forceinline__ void clear_values(uint32_t ring, const Ring<Shape>& block, int32_t hidden, int32_t unused) {
  constexpr int kVectors = kLineBytes / 16;
  hidden = max_of(hidden, 0);
  const int32_t vectors = (kBlockTokens - hidden) * kVectors;
#pragma unroll 1
  for (int c = 0; c < kLatentChunks; ++c) {
    const uint32_t chunk = ring + block.slot_after(c / kSlotChunks) * kSlotBytes + (c % kSlotChunks) * kChunkBytes;
#pragma unroll 1
    for (int i = threadIdx.x % kGroupThreads; i < vectors; i += kGroupThreads) {
      const uint32_t address = chunk + hidden * kLineBytes + i * 16;
      uint4 value{};
      if (hidden + i / kVectors < unused) {
        value = ptx::load_shared_16(address);
        value = {finite<Element>(value.x), finite<Element>(value.y), finite<Element>(value.z),
                 finite<Element>(value.w)};
      }
      ptx::store_shared_16(address, value);
    }
  }
}

// The item's end, by all score warps: the sums over all tokens, lse to where it belongs, and the normalisation for the
// output warps. `behind`: the last block was not this group's, which therefore has its message still to heed.
template <class Shape>
__device__ __forceinline__ void finish_tile(const DecodeParams& p, const Tile& tile, int last_buffer, bool behind,
                                            Sums<Shape>& sums, uint32_t parity, Control<Shape>& control) {
  constexpr int kScoreThreads = Shape::kScoreGroups * kGroupThreads;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, thread = threadIdx.x, warp = thread / 32;
  ptx::barrier_sync(kItemBarrier, kScoreThreads);
  if (behind && (control.messages[last_buffer] & kRescale)) rescale_sums<Shape>(control.rescale[last_buffer], sums);
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    float2 sum;
    sum.x = over_tokens(sums[2 * j], [](float a, float b) { return a + b; });
    sum.y = over_tokens(sums[2 * j + 1], [](float a, float b) { return a + b; });
    if (g == 0) *reinterpret_cast<float2*>(&control.sums[warp][j * 8 + 2 * t]) = sum;
  }
  // Read before the other group may go on to the next item.
  const float reference = thread < Shape::kRows ? control.references[thread] : 0;
  ptx::barrier_sync(kItemBarrier, kScoreThreads);
  if (thread >= kGroupThreads) return;
  ptx::mbarrier_wait(ptx::shared_address(&control.sums_empty), parity ^ 1);
  if (thread == 0) control.finished = tile;
  if (thread < Shape::kRows) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < Shape::kScoreWarps; ++w) sum += control.sums[w][thread];
    const bool empty = sum == 0;  // no key was visible: what has the maximum weighs 1 or more
    control.inverse[thread] = empty ? 0 : 1 / sum;
    if (thread < tile.rows) {
      const bool direct = tile.partial < 0;
      const int64_t first_row = direct ? tile.first_row : int64_t{tile.partial} * Shape::kRows;
      (direct ? p.lse : p.partial_lse)[first_row + thread] = empty ? -INFINITY : reference * kLn2 + logf(sum);
    }
  }
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&control.sums_full));
}

template <class Element, class Shape>
__device__ __forceinline__ void score_tiles(const DecodeParams& p, uint32_t ring, uint32_t queries_address,
                                            Control<Shape>& control) {
  constexpr bool kTurns = Shape::kScoreGroups == 2;
  constexpr int kTurnThreads = 2 * kGroupThreads;
  const int lane = threadIdx.x % 32, thread = threadIdx.x % kGroupThreads;
  const int group = kTurns ? __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / kGroupThreads, 0) : 0;
  const int warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0);
  const uint32_t full = ptx::shared_address(control.full);
  const uint32_t weights_full = ptx::shared_address(control.weights_full);
  const uint32_t query_empty = ptx::shared_address(&control.query_empty);
  const uint32_t queries = ptx::matrix_operand(queries_address);
  const float scale = p.scale * kLog2E;
  const int page_of_warp = p.page_size < kBlockTokens ? warp * 16 / p.page_size : 0;
  Ring<Shape> start;  // of the next item
  int buffer = 0;     // of its first block; the other group's, where there are two, if it is not `group`
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

    int32_t block = kTurns ? group ^ buffer : 0;
    Ring<Shape> position = start;
    position.skip(block);
    if (block >= blocks) {
      __syncwarp();  // all lanes have read the item
      if (lane == 0) ptx::mbarrier_arrive(query_empty);
    }
    for (; block < blocks; block += Shape::kScoreGroups) {
      const int own = kTurns ? group : buffer ^ (block & 1);
      const Ring<Shape> block_start = position;
      Scores<Shape> score;
      const uint32_t weights = score_block<Element>(ring, queries, full, position, score);
      if (kTurns) position.skip(1);
      if (block + Shape::kScoreGroups >= blocks) {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(query_empty);
      }
#pragma unroll
      for (int i = 0; i < Shape::kRows / 2; ++i) score[i] *= scale;
      const bool page_valid = control.valid_pages[block_start.slot] >> page_of_warp & 1;
      if (!page_valid || block >= whole_blocks) {
        mask_scores<Shape>(visible_end, tile.kv_begin + block * kBlockTokens, page_valid, score);
      }

      bool outgrown = false;
      if (block > 0) {
        if (kTurns) {
          ptx::barrier_sync(kTurnBarrier + group, kTurnThreads);
          const uint32_t before = control.messages[own ^ 1];
          if (before & kRescale) rescale_sums<Shape>(control.rescale[own ^ 1], sums);
          unset = before & kUnset;
        }
        outgrown = subtract_references<Shape>(control.references, score);
      }
      uint32_t message = 0;
      // The barrier also shows that all of the group have read the keys, so that the weights may replace them.
      if (ptx::barrier_any(kGroupBarrier + group, kGroupThreads, outgrown || unset)) {
        message = move_references(/*fresh=*/block == 0, tile.rows, group, own, score, control);
        if (message & kRescale) rescale_sums<Shape>(control.rescale[own], sums);
      }
      unset = message & kUnset;
      if (block + 1 == blocks) message |= kLast;
      if (thread == 0) control.messages[own] = message;
      if (kTurns && block + 1 < blocks) ptx::barrier_arrive(kTurnBarrier + (group ^ 1), kTurnThreads);

      write_weights<Element, Shape>(score, weights, sums);
      if (block >= whole_blocks) {
        const int32_t first_token = tile.kv_begin + block * kBlockTokens;
        clear_values<Element>(ring, block_start, visible_end[0] - first_token, tile.kv_end - first_token);
      }
      ptx::fence_async_proxy();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(weights_full + own * 8);
    }
    start.skip(blocks);
    const int last_buffer = buffer ^ ((blocks - 1) & 1);
    buffer = last_buffer ^ 1;
    finish_tile(p, tile, last_buffer, kTurns && group != last_buffer, sums, item_parity, control);
  }

  // When the output warps have taken the last item's sums, they have read all messages.
  if (kTurns && group != buffer) return;
  ptx::mbarrier_wait(ptx::shared_address(&control.sums_empty), item_parity ^ 1);
  if (thread == 0) control.messages[buffer] = kStop;
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(weights_full + buffer * 8);
}

}  // namespace mla::sm90
