// The score warps: S^T = K Q^T for each block, online softmax over its tokens, weights P^T for the output warps.
//
// Tokens are the rows of S^T, (query, head) rows its columns. Lane 4 * g + t of warp w has the scores of tokens
// 16w + g and 16w + g + 8 with the rows 8j + 2t and 8j + 2t + 1, in score[4j .. 4j+3] as wgmma.cuh says; of what it
// keeps a row, [2j] and [2j + 1] belong to those two.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/decode/sm90/shape.h"
#include "kernels/decode/softmax.h"

namespace mla::sm90 {

template <class Shape>
using Scores = float[Shape::kRows / 2];

template <class Shape>
using PerRow = float[Shape::kRows / 4];

// The same in all lanes of equal t, of all warps, but for `sum`, which is over this lane's tokens alone.
template <class Shape>
struct Softmax {
  PerRow<Shape> reference;  // of the exponents, in base 2
  PerRow<Shape> sum;
};

// Combines values of lanes that differ in g.
template <class Combine>
__device__ __forceinline__ float over_tokens(float value, Combine combine) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    value = combine(value, __shfl_xor_sync(0xFFFFFFFF, value, distance));
  }
  return value;
}

// Waits for a block's slots in turn and multiplies it with the queries. Returns where its rope keys lie, which the
// weights will replace.
template <class Element, class Shape>
__device__ __forceinline__ uint32_t score_block(uint32_t ring, uint64_t queries, uint32_t full, Ring<Shape>& position,
                                                Scores<Shape>& score) {
  uint32_t rope = 0;
#pragma unroll
  for (int i = 0; i < kBlockSlots; ++i) {
    ptx::mbarrier_wait(full + position.slot * 8, position.parity);
    const uint32_t slot = ring + position.slot * kSlotBytes;
    const uint64_t keys = ptx::matrix_descriptor(slot);
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
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  const int32_t token = warp * 16 + g;
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    const int2 end = *reinterpret_cast<const int2*>(visible_end + j * 8 + 2 * t);
    const int32_t visible[2] = {page_valid ? end.x - first_token : 0, page_valid ? end.y - first_token : 0};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (token >= visible[e]) score[4 * j + e] = -INFINITY;
      if (token + 8 >= visible[e]) score[4 * j + 2 + e] = -INFINITY;
    }
  }
}

// Moves the references of rows whose scores have outgrown them. True: the output so far has to be rescaled, by factors
// that are then in control.rescale[buffer]. A barrier of the score warps is passed on the way.
template <class Shape>
__device__ __forceinline__ bool update_references(const Scores<Shape>& score, int buffer, Softmax<Shape>& softmax,
                                                  Control<Shape>& control) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    float2 highest;
    highest.x = over_tokens(fmaxf(score[4 * j], score[4 * j + 2]), fmaxf);
    highest.y = over_tokens(fmaxf(score[4 * j + 1], score[4 * j + 3]), fmaxf);
    if (g == 0) *reinterpret_cast<float2*>(&control.highest[buffer][warp][j * 8 + 2 * t]) = highest;
  }
  ptx::barrier_sync(kScoreBarrier, kGroupThreads);

  bool rescaled = false;
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    float highest[2] = {-INFINITY, -INFINITY}, factor[2] = {1, 1};
#pragma unroll
    for (int w = 0; w < kScoreWarps; ++w) {
      const float2 other = *reinterpret_cast<const float2*>(&control.highest[buffer][w][j * 8 + 2 * t]);
      highest[0] = fmaxf(highest[0], other.x);
      highest[1] = fmaxf(highest[1], other.y);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& reference = softmax.reference[2 * j + e];
      if (highest[e] > reference + kSlack) {
        if (reference != -INFINITY) {  // else there is nothing yet to rescale
          factor[e] = ptx::exp2_approximate(reference - highest[e]);
          softmax.sum[2 * j + e] *= factor[e];
          rescaled = true;
        }
        reference = highest[e];
      }
    }
    if (warp == 0 && g == 0) {
      *reinterpret_cast<float2*>(&control.rescale[buffer][j * 8 + 2 * t]) = make_float2(factor[0], factor[1]);
    }
  }
  return __any_sync(0xFFFFFFFF, rescaled);
}

// P^T of the block, a line of 64 tokens for each row, as the B operand of the output's product.
template <class Element, class Shape>
__device__ __forceinline__ void write_weights(const Scores<Shape>& score, uint32_t weights, Softmax<Shape>& softmax) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // stmatrix: lanes 0-7 address the rows' first eight tokens of this warp, lanes 8-15 the next eight.
  const int row = lane % 8, chunk = 2 * warp + lane / 8 % 2;
  const uint32_t target = weights + row * kLineBytes + ((chunk ^ row) << 4);
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    float weight[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float reference = softmax.reference[2 * j + e % 2];
      weight[e] = ptx::exp2_approximate(score[4 * j + e] - (reference == -INFINITY ? 0 : reference));
      softmax.sum[2 * j + e % 2] += weight[e];
    }
    ptx::stmatrix_x2_trans(target + j * 8 * kLineBytes, pack<Element>(weight[0], weight[1]),
                           pack<Element>(weight[2], weight[3]));
  }
}

// Zeros for the values of the tokens from `first` on, which may be NaN: a weight of 0 does not silence them.
template <class Shape>
__device__ __forceinline__ void clear_values(uint32_t ring, const Ring<Shape>& block, int32_t first) {
  constexpr int kVectors = kLineBytes / 16;
  const int32_t lines = kBlockTokens - max_of(first, 0);
#pragma unroll 1
  for (int c = 0; c < kLatentChunks; ++c) {
    const uint32_t chunk = ring + block.slot_after(c / kSlotChunks) * kSlotBytes + (c % kSlotChunks) * kChunkBytes;
    const uint32_t start = chunk + (kBlockTokens - lines) * kLineBytes;
    for (int i = threadIdx.x; i < lines * kVectors; i += kGroupThreads) ptx::store_shared_zeros_16(start + i * 16);
  }
}

// The item's end: the sums over all tokens, lse to where it belongs, and the normalisation for the output warps.
template <class Shape>
__device__ __forceinline__ void finish_tile(const DecodeParams& p, const Tile& tile, Softmax<Shape>& softmax,
                                            uint32_t parity, Control<Shape>& control) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32, thread = threadIdx.x;
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    float2 sum;
    sum.x = over_tokens(softmax.sum[2 * j], [](float a, float b) { return a + b; });
    sum.y = over_tokens(softmax.sum[2 * j + 1], [](float a, float b) { return a + b; });
    if (g != 0) continue;
    *reinterpret_cast<float2*>(&control.sums[warp][j * 8 + 2 * t]) = sum;
    if (warp == 0) {
      *reinterpret_cast<float2*>(&control.references[j * 8 + 2 * t]) =
          make_float2(softmax.reference[2 * j], softmax.reference[2 * j + 1]);
    }
  }
  ptx::barrier_sync(kScoreBarrier, kGroupThreads);
  ptx::mbarrier_wait(ptx::shared_address(&control.sums_empty), parity ^ 1);
  if (thread == 0) control.finished = tile;
  if (thread < Shape::kRows) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kScoreWarps; ++w) sum += control.sums[w][thread];
    const bool empty = sum == 0;  // no key was visible: what has the maximum weighs 1 or more
    control.inverse[thread] = empty ? 0 : 1 / sum;
    if (thread < tile.rows) {
      const bool direct = tile.partial < 0;
      const int64_t first_row = direct ? tile.first_row : int64_t{tile.partial} * Shape::kRows;
      (direct ? p.lse : p.partial_lse)[first_row + thread] =
          empty ? -INFINITY : control.references[thread] * kLn2 + logf(sum);
    }
  }
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&control.sums_full));
}

template <class Element, class Shape>
__device__ __forceinline__ void score_tiles(const DecodeParams& p, uint32_t ring, uint32_t queries_address,
                                            Control<Shape>& control) {
  const int lane = threadIdx.x % 32, thread = threadIdx.x;
  const int warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0);
  const uint32_t full = ptx::shared_address(control.full);
  const uint32_t weights_full = ptx::shared_address(control.weights_full);
  const uint64_t queries = ptx::matrix_descriptor(queries_address);
  const float scale = p.scale * kLog2E;
  const int page_of_warp = p.page_size < kBlockTokens ? warp * 16 / p.page_size : 0;
  Ring<Shape> position;
  uint32_t item_parity = 0;
  int buffer = 0;

  for (;; item_parity ^= 1) {
    ptx::mbarrier_wait(ptx::shared_address(&control.query_full), item_parity);
    const Tile tile = control.tile;
    if (tile.rows == 0) break;
    if (thread < Shape::kRows) control.visible_end[thread] = visible_end(p, tile, thread);
    ptx::barrier_sync(kScoreBarrier, kGroupThreads);
    const int32_t visible_to_all = control.visible_end[0];  // the first row belongs to the first query
    Softmax<Shape> softmax;
#pragma unroll
    for (int i = 0; i < Shape::kRows / 4; ++i) {
      softmax.reference[i] = -INFINITY;
      softmax.sum[i] = 0;
    }

    const int32_t blocks = block_count(tile);
    for (int32_t block = 0; block < blocks; ++block, buffer ^= 1) {
      const int32_t first_token = tile.kv_begin + block * kBlockTokens;
      const bool last = block + 1 == blocks;
      const Ring<Shape> start = position;
      Scores<Shape> score;
      const uint32_t weights = score_block<Element>(ring, queries, full, position, score);
      if (last) {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&control.query_empty));
      }
#pragma unroll
      for (int i = 0; i < Shape::kRows / 2; ++i) score[i] *= scale;
      const bool page_valid = control.valid_pages[start.slot] >> page_of_warp & 1;
      if (!page_valid || visible_to_all - first_token < kBlockTokens) {
        mask_scores<Shape>(control.visible_end, first_token, page_valid, score);
      }
      const bool rescaled = update_references<Shape>(score, buffer, softmax, control);
      if (thread == 0) control.messages[buffer] = (rescaled ? kRescale : 0u) | (last ? kLast : 0u);
      // From here on all score warps have read the keys.
      write_weights<Element, Shape>(score, weights, softmax);
      if (tile.kv_end - first_token < kBlockTokens) clear_values(ring, start, tile.kv_end - first_token);
      ptx::fence_async_proxy();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(weights_full + buffer * 8);
    }
    finish_tile(p, tile, softmax, item_parity, control);
  }

  // When the output warps have taken the last item's sums, they have read all messages.
  ptx::mbarrier_wait(ptx::shared_address(&control.sums_empty), item_parity ^ 1);
  if (thread == 0) control.messages[buffer] = kStop;
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(weights_full + buffer * 8);
}

}  // namespace mla::sm90
