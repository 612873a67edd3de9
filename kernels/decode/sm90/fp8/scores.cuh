// The score warps: S^T = K Q^T for each block, online softmax over its tokens, weights P^T for the output warps.
//
// Tokens are the rows of S^T, (query, head) rows its columns. Lane 4 * g + t of a group's warp w has the scores of
// tokens 16w + g and 16w + g + 8 with the rows 8j + 2t and 8j + 2t + 1, in score[4j .. 4j+3] as wgmma.cuh says; of what
// it keeps a row, [2j] and [2j + 1] belong to those two.
//
// The keys pass through registers: ldmatrix brings their bytes in the order of the product's left operand, and each
// pair of bytes becomes a pair of fp16.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/decode/sm90/fp8/instructions.cuh"
#include "kernels/decode/sm90/fp8/queries.cuh"
#include "kernels/decode/sm90/fp8/shape.h"
#include "kernels/decode/softmax.h"

namespace mla::sm90::fp8 {

template <class Shape>
using Scores = float[Shape::kRows / 2];

template <class Shape>
using PerRow = float[Shape::kRows / 4];

// Weights are scaled by it, so that fp16 holds them down to 2^-31 of the largest; with the softmax's slack they stay
// below 2^15.
constexpr float kWeightExponent = 7;

// Where this lane's rows of the left operand lie in a slot: lanes 0-15 address the warp's tokens at 16 columns, lanes
// 16-31 at the next 16. 32 columns on is bit 5 flipped, four times in a line.
struct NoScales;
struct KeyLines {
  using Scales = NoScales;
  uint32_t latent, rope;

  // `warp`: its tokens are the `warp`-th sixteen of the slot.
  __device__ __forceinline__ explicit KeyLines(int warp, uint32_t rope_offset = kRopeOffset) {
    const int lane = threadIdx.x % 32, unit = lane / 16, line = lane % 8, group = 2 * warp + lane / 8 % 2;
    latent = group * kLatentGroupBytes + line * kLineBytes + ((unit ^ line) << 4);
    rope = rope_offset + group * kRopeGroupBytes + line * kRope + ((unit ^ (line / 2)) << 4);
  }
};

// The bytes of 32 columns and more.
template <int kLoads>
__device__ __forceinline__ void load_key_bytes(const KeyLines& lines, uint32_t slot, int first,
                                               uint32_t (&bytes)[kLoads][4]) {
  constexpr int kLatentLoads = kLatent / 32, kLineLoads = kLineBytes / 32;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int load = first + i;
    ptx::ldmatrix_x4(bytes[i], load < kLatentLoads ? ((slot + lines.latent) ^ (load % kLineLoads << 5)) +
                                                         load / kLineLoads * kChunkBytes
                                                   : (slot + lines.rope) ^ ((load - kLatentLoads) << 5));
  }
}

template <int kLoads>
__device__ __forceinline__ void expand_keys(const uint32_t (&bytes)[kLoads][4], uint32_t (&fragments)[2 * kLoads][4]) {
#pragma unroll
  for (int i = 0; i < 2 * kLoads; ++i) {
    const uint32_t upper = bytes[i / 2][i % 2 * 2], lower = bytes[i / 2][i % 2 * 2 + 1];  // tokens g and g + 8
    fragments[i][0] = ptx::f16_from_e4m3_low(upper);
    fragments[i][1] = ptx::f16_from_e4m3_low(lower);
    fragments[i][2] = ptx::f16_from_e4m3_high(upper);
    fragments[i][3] = ptx::f16_from_e4m3_high(lower);
  }
}

// What a token's scale has to do with its weights: nothing here.
struct NoScales {
  // The sum of the weights, when one of token g or g + 8 joins it.
  __device__ __forceinline__ float in_sum(float weight, float sum, int /*half*/) const { return sum + weight; }
};

// Left operands, as cached and as multiplied.
template <class Shape>
struct KeyOperands {
  uint32_t bytes[Shape::kLoads][4];
  uint32_t fragments[Shape::kScoreBuffers][Shape::kProducts][4];
};

// The first products' operands, ahead of the others.
template <class Shape, class Keys>
__device__ __forceinline__ void start_keys(const Keys& keys, uint32_t slot, KeyOperands<Shape>& operands) {
  load_key_bytes(keys, slot, 0, operands.bytes);
  expand_keys(operands.bytes, operands.fragments[0]);
}

// The products of a block with the queries, the last of which still run. The next bytes are fetched, and become
// operands, while the products before them run. kStarted: start_keys() has made the first operands.
template <class Shape, bool kStarted, class Keys>
__device__ __forceinline__ void multiply_keys(const Keys& keys, uint32_t slot, uint32_t queries,
                                              KeyOperands<Shape>& operands, Scores<Shape>& score) {
  constexpr int kSteps = kWidth / kProductDepth / Shape::kProducts, kBuffers = Shape::kScoreBuffers;
  auto& [bytes, fragments] = operands;
  if constexpr (!kStarted) load_key_bytes(keys, slot, 0, bytes);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step >= kBuffers) ptx::wgmma_wait<kBuffers - 1>();
    if (!kStarted || step > 0) expand_keys(bytes, fragments[step % kBuffers]);
    if (step + 1 < kSteps) load_key_bytes(keys, slot, (step + 1) * Shape::kLoads, bytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Shape::kProducts; ++i) {
      constexpr int kChunkProducts = kProductColumns / kProductDepth;
      const int product = step * Shape::kProducts + i;
      const int offset = product / kChunkProducts * Shape::kQueryChunkBytes + product % kChunkProducts * 32;
      ptx::register_wgmma(score, fragments[step % kBuffers][i], queries + offset / 16, product != 0);
    }
    ptx::wgmma_commit();
  }
}

// A block's scores; its slot is given back on the way.
template <class Shape>
__device__ __forceinline__ void score_block(const KeyLines& lines, uint32_t slot, uint32_t empty, uint32_t queries,
                                            NoScales&, Scores<Shape>& score) {
  KeyOperands<Shape> operands;
  multiply_keys<Shape, /*kStarted=*/false>(lines, slot, queries, operands, score);
  ptx::mbarrier_arrive_warp(empty);
  ptx::wgmma_wait<0>();
}

// What `values` has for this lane's rows 8j + 2t and 8j + 2t + 1.
__device__ __forceinline__ float2 row_pair(const float* values, int j) {
  return *reinterpret_cast<const float2*>(values + j * 8 + 2 * (threadIdx.x % 4));
}

// Products become scores in base 2; where tokens have scales, lifted as well, by `scales.exponent` of token g or g + 8.
template <class Shape, class Scales>
__device__ __forceinline__ void scale_products(const float* factors, const Scales& scales, Scores<Shape>& score) {
  constexpr bool kLifts = !std::is_same_v<Scales, NoScales>;
  [[maybe_unused]] float exponents[2];
  if constexpr (kLifts) {
    exponents[0] = scales.exponent(0);
    exponents[1] = scales.exponent(1);
  }
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    const float2 factor = row_pair(factors, j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float of_row = e % 2 == 0 ? factor.x : factor.y;
      if constexpr (kLifts) {
        score[4 * j + e] = fmaf(score[4 * j + e], of_row, exponents[e / 2]);
      } else {
        score[4 * j + e] *= of_row;
      }
    }
  }
}

// -inf where a row does not see a token. `first_token`: of the block.
template <class Shape>
__device__ __forceinline__ void mask_scores(const int32_t* visible_end, int32_t first_token, uint32_t valid_groups,
                                            int warp, Scores<Shape>& score) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int32_t token = first_token + warp * 16 + g;
  const bool upper_valid = (valid_groups >> (2 * warp) & 1) != 0, lower_valid = (valid_groups >> (2 * warp) & 2) != 0;
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int32_t end = visible_end[j * 8 + 2 * t + e];
      if (!upper_valid || token >= end) score[4 * j + e] = -INFINITY;
      if (!lower_valid || token + 8 >= end) score[4 * j + 2 + e] = -INFINITY;
    }
  }
}

// Whether a score has outgrown its row's reference.
template <class Shape>
__device__ __forceinline__ bool outgrown(const Scores<Shape>& score, const float* references) {
  float largest = -INFINITY;
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    const float2 reference = row_pair(references, j);
    largest = fmaxf(largest, fmaxf(score[4 * j], score[4 * j + 2]) - reference.x);
    largest = fmaxf(largest, fmaxf(score[4 * j + 1], score[4 * j + 3]) - reference.y);
  }
  return largest > kWeightExponent + kSlack;
}

template <class Shape>
__device__ __forceinline__ void rescale_sums(const float* rescale, PerRow<Shape>& sum) {
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    const float2 factor = row_pair(rescale, j);
    sum[2 * j] *= factor.x;
    sum[2 * j + 1] *= factor.y;
  }
}

// Of a group's block each row's highest score among a warp's tokens.
template <class Shape>
__device__ __forceinline__ void share_maxima(const Scores<Shape>& score, float (&by_warp)[kGroupWarps][Shape::kRows]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = threadIdx.x % kGroupThreads;
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    float2 highest;
    highest.x = combine_over_g(fmaxf(score[4 * j], score[4 * j + 2]), fmaxf);
    highest.y = combine_over_g(fmaxf(score[4 * j + 1], score[4 * j + 3]), fmaxf);
    if (g == 0) *reinterpret_cast<float2*>(&by_warp[row / 32][j * 8 + 2 * t]) = highest;
  }
}

// Moves the references of rows whose scores have outgrown them; by how much that shrinks what was summed so far is then
// in `rescale`. One group, whose turn it is.
template <class Shape>
__device__ __forceinline__ void move_references(const Scores<Shape>& score, int group, float* rescale,
                                                Control<Shape>& control) {
  const int row = threadIdx.x % kGroupThreads;
  float (&by_warp)[kGroupWarps][Shape::kRows] = control.by_warp[group];
  share_maxima<Shape>(score, by_warp);
  ptx::barrier_sync(kGroupBarrier + group, kGroupThreads);
  if (row < Shape::kRows) {
    float highest = -INFINITY;
#pragma unroll
    for (int w = 0; w < kGroupWarps; ++w) highest = fmaxf(highest, by_warp[w][row]);
    float& reference = control.reference[row];
    float factor = 1;
    if (highest - reference > kWeightExponent + kSlack) {
      factor = ptx::exp2_approximate(reference - (highest - kWeightExponent));
      reference = highest - kWeightExponent;
    }
    rescale[row] = factor;
  }
  ptx::barrier_sync(kGroupBarrier + group, kGroupThreads);
}

// P^T of the block, a line of 64 tokens for each row, as the right operand of the output's product.
template <class Shape>
__device__ __forceinline__ void write_weights(const Scores<Shape>& score, const NoScales&, const float* references,
                                              int warp, uint32_t weights, PerRow<Shape>& sum) {
  const int lane = threadIdx.x % 32;
  // stmatrix: lanes 0-7 address the rows' first eight tokens of this warp, lanes 8-15 the next eight.
  const int line = lane % 8, unit = 2 * warp + lane / 8 % 2;
  const uint32_t target = weights + line * kLineBytes + ((unit ^ line) << 4);
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    const float2 reference = row_pair(references, j);
    float weight[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      weight[e] = ptx::exp2_approximate(score[4 * j + e] - (e % 2 == 0 ? reference.x : reference.y));
      sum[2 * j + e % 2] += weight[e];
    }
    ptx::stmatrix_x2_trans(target + j * 8 * kLineBytes, pack<__half>(weight[0], weight[1]),
                           pack<__half>(weight[2], weight[3]));
  }
}

// The sums of the weights over this warp's tokens, for finish_row. `warp`: of the group.
template <class Shape>
__device__ __forceinline__ void share_sums(int group, int warp, const PerRow<Shape>& sum, Control<Shape>& control) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    float2 total;
    total.x = combine_over_g(sum[2 * j], [](float a, float b) { return a + b; });
    total.y = combine_over_g(sum[2 * j + 1], [](float a, float b) { return a + b; });
    if (g == 0) *reinterpret_cast<float2*>(&control.by_warp[group][warp][j * 8 + 2 * t]) = total;
  }
}

// A row's sum over all tokens, lse to where it belongs, and what normalises the output.
template <class Shape, class Params>
__device__ __forceinline__ void finish_row(const Params& p, const Tile& tile, int row, Control<Shape>& control) {
  float total = 0;
#pragma unroll
  for (int w = 0; w < Shape::kScoreWarps; ++w) total += control.by_warp[w / kGroupWarps][w % kGroupWarps][row];
  const bool empty = total == 0;  // no key was visible: what has the maximum weighs 2^-8 or more
  control.inverse[row] = empty ? 0 : control.k_scale / total;
  if (row >= tile.rows) return;
  const bool direct = tile.partial < 0;
  const int64_t first_row = direct ? tile.first_row : partial_row(p, tile.partial, tile.first_row, Shape::kRows);
  (direct ? p.lse : p.partial_lse)[first_row + row] = empty ? -INFINITY : control.reference[row] * kLn2 + logf(total);
  if (!empty && direct) add_sink(p, tile, row, total, control.reference[row], control.inverse[row]);
}

// The item's end, by all score warps; then the output warps know how to normalise.
template <class Shape, class Params>
__device__ __forceinline__ void finish_tile(const Params& p, int group, uint32_t parity, const PerRow<Shape>& sum,
                                            Control<Shape>& control) {
  const int row = threadIdx.x;
  share_sums<Shape>(group, row % kGroupThreads / 32, sum, control);
  ptx::barrier_sync(kScoreBarrier, Shape::kScoreThreads);
  if (group != 0) return;
  const Tile& tile = control.tile;
  ptx::mbarrier_wait(ptx::shared_address(&control.sums_empty), parity ^ 1);
  if (row == 0) control.finished = tile;
  if (row < Shape::kRows) finish_row<Shape>(p, tile, row, control);
  ptx::mbarrier_arrive_warp(ptx::shared_address(&control.sums_full));
  ptx::mbarrier_arrive_warp(ptx::shared_address(&control.tile_empty));
}

// `Keys`: how a warp reads a block, and with it what a token's scale is.
template <class Shape, class Keys, class Params>
__device__ __forceinline__ void score_tiles(const Params& p, int32_t layer, uint32_t base,
                                            unsigned char* queries_pointer, Control<Shape>& control) {
  constexpr bool kTwoGroups = Shape::kScoreGroups == 2;
  const int thread = threadIdx.x;
  const int group = kTwoGroups ? __shfl_sync(0xFFFFFFFF, thread / kGroupThreads, 0) : 0;
  const int warp = __shfl_sync(0xFFFFFFFF, thread / 32 % kGroupWarps, 0);  // of the group
  const uint32_t full = ptx::shared_address(control.full), empty = ptx::shared_address(control.empty);
  const uint32_t weights_full = ptx::shared_address(control.weights_full);
  const uint32_t weights_empty = ptx::shared_address(control.weights_empty);
  const uint32_t queries = ptx::matrix_operand(base + Shape::kQueryOffset);
  const Keys keys(warp);
  Ring<Shape> position;         // of the item's next block, whoever's it is
  uint32_t weights_parity = 0;  // of each buffer's next use, a bit each
  uint32_t item_parity = 0;

  for (;; item_parity ^= 1) {
    ptx::mbarrier_wait(ptx::shared_address(&control.tile_full), item_parity);
    if (control.tile.rows == 0) return;
    take_queries<Shape>(p, layer, queries_pointer, control);
    ptx::barrier_sync(kScoreBarrier, Shape::kScoreThreads);
    const int32_t visible_to_all = control.visible_end[0];  // the first row belongs to the first query
    const int32_t blocks = block_count(control.tile), kv_begin = control.tile.kv_begin;
    PerRow<Shape> sum = {};

    for (int32_t block = 0; block < blocks; ++block, position.advance()) {
      const int buffer = block % 2;
      if (kTwoGroups && buffer != group) continue;
      const int32_t first_token = kv_begin + block * kBlockTokens;
      Scores<Shape> score;
      ptx::mbarrier_wait(full + position.slot * 8, position.parity);
      const uint32_t valid_groups = control.blocks[position.slot].flags & kAllGroups;
      typename Keys::Scales scales;
      score_block<Shape>(keys, base + position.slot * Shape::kSlotBytes, empty + position.slot * 8, queries, scales,
                         score);
      scale_products<Shape>(control.factor, scales, score);
      if (valid_groups != kAllGroups || visible_to_all - first_token < kBlockTokens) {
        mask_scores<Shape>(control.visible_end, first_token, valid_groups, warp, score);
      }
      // The output warps have read the weights and the factors that were here before.
      ptx::mbarrier_wait(weights_empty + buffer * 8, (weights_parity >> buffer & 1) ^ 1);
      weights_parity ^= 1u << buffer;

      // The references move in the order of the blocks: a group waits for its turn.
      if (kTwoGroups && block > 0) {
        ptx::barrier_sync(kTurnBarrier + group, 2 * kGroupThreads);
        if (control.rescaled[buffer ^ 1]) rescale_sums<Shape>(control.rescale[buffer ^ 1], sum);
      }
      const bool moved =
          ptx::barrier_any(kGroupBarrier + group, kGroupThreads, outgrown<Shape>(score, control.reference));
      if (moved) {
        move_references<Shape>(score, group, control.rescale[buffer], control);
        rescale_sums<Shape>(control.rescale[buffer], sum);
      }
      if (thread % kGroupThreads == 0) control.rescaled[buffer] = moved && block > 0;
      write_weights<Shape>(score, scales, control.reference, warp,
                           base + Shape::kWeightOffset + buffer * Shape::kWeightBytes, sum);
      // Not before the weights are made: the next block may move the references that they are relative to.
      if (kTwoGroups && block + 1 < blocks) ptx::barrier_arrive(kTurnBarrier + (group ^ 1), 2 * kGroupThreads);
      ptx::fence_async_proxy();
      ptx::mbarrier_arrive_warp(weights_full + buffer * 8);
    }
    const int32_t last_block = block_count(control.tile) - 1;  // counted again, rather than kept in a register
    if (kTwoGroups && last_block > 0) {                        // what it moved after this group's last
      ptx::barrier_sync(kScoreBarrier, Shape::kScoreThreads);
      const int last = last_block % 2;
      if (group != last && control.rescaled[last]) rescale_sums<Shape>(control.rescale[last], sum);
    }
    finish_tile<Shape>(p, group, item_parity, sum, control);
  }
}

}  // namespace mla::sm90::fp8
