// The score warps: S^T = K Q^T for each block, online softmax over its tokens, weights P^T for the output warps.
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/decode/sm90/fp8/converted.cuh"
#include "kernels/decode/sm90/fp8/native.cuh"
#include "kernels/decode/sm90/fp8/queries.cuh"
#include "kernels/decode/sm90/fp8/shape.h"
#include "kernels/decode/sm90/fp8/weights.cuh"
#include "kernels/decode/softmax.h"

namespace mla::sm90::fp8 {

// The item's end: the sums over all tokens, lse to where it belongs, and the normalisation for the output warps.
template <class Shape>
__device__ __forceinline__ void finish_tile(const DecodeParams& p, int group, uint32_t parity,
                                            const WeightSums<Shape>& sum, Control<Shape>& control) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = threadIdx.x;
  float* by_row = control.by_warp[group][row % kGroupThreads / 32] + 2 * t;
  if constexpr (Shape::kNative) {
    if (g < Shape::kRowGroups) *reinterpret_cast<float2*>(by_row + g * 8) = {sum[0], sum[1]};
  } else {
#pragma unroll
    for (int j = 0; j < Shape::kRowGroups; ++j) {
      float2 total;
      total.x = combine_over_g(sum[2 * j], [](float a, float b) { return a + b; });
      total.y = combine_over_g(sum[2 * j + 1], [](float a, float b) { return a + b; });
      if (g == 0) *reinterpret_cast<float2*>(by_row + j * 8) = total;
    }
  }
  ptx::barrier_sync(kScoreBarrier, Shape::kScoreThreads);
  if (group != 0) return;
  const Tile& tile = control.tile;
  ptx::mbarrier_wait(ptx::shared_address(&control.sums_empty), parity ^ 1);
  if (row == 0) control.finished = tile;
  if (row < Shape::kRows) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < Shape::kScoreWarps; ++w) total += control.by_warp[w / kGroupWarps][w % kGroupWarps][row];
    const bool empty = total == 0;  // no key was visible: what has the maximum weighs 2^-8 or more
    control.inverse[row] = empty ? 0 : control.k_scale / total;
    if (row < tile.rows) {
      const bool direct = tile.partial < 0;
      const int64_t first_row = direct ? tile.first_row : int64_t{tile.partial} * Shape::kRows;
      (direct ? p.lse : p.partial_lse)[first_row + row] =
          empty ? -INFINITY : control.reference[row] * kLn2 + logf(total);
    }
  }
  __syncwarp();
  if (lane != 0) return;
  ptx::mbarrier_arrive(ptx::shared_address(&control.sums_full));
  ptx::mbarrier_arrive(ptx::shared_address(&control.tile_empty));
}

// What a score warp goes by.
template <class Shape>
struct ScoreState {
  uint32_t base;
  int group, warp;                                             // the warpgroup, the warp in it
  Ring<Shape> position = {};                                   // of the item's next block, whoever's it is
  uint32_t weights_parity = 0;                                 // of each buffer's next use, a bit each
  int32_t kv_begin = 0, blocks = 0, visible_to_all = 0;        // of the item
};

// What this warp has written for the output's products is there.
__device__ __forceinline__ void hand_over(uint32_t barrier) {
  ptx::fence_async_proxy();
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

// Masks a block's scores, makes weights of them and hands them to the output warps.
template <class Shape>
__device__ __forceinline__ void weigh_block(ScoreState<Shape>& state, int32_t block, uint32_t valid_groups,
                                            Scores<Shape>& score, WeightSums<Shape>& sum, Control<Shape>& control) {
  constexpr bool kTwoGroups = Shape::kScoreGroups == 2;
  const int buffer = block % 2, group = state.group;
  const int32_t first_token = state.kv_begin + block * kBlockTokens;
  scale_products<Shape>(control.factor, score);
  if (valid_groups != kAllGroups || state.visible_to_all - first_token < kBlockTokens) {
    mask_scores<Shape>(control.visible_end, first_token, valid_groups, state.warp, score);
  }
  // The output warps have read the weights and the factors that were here before.
  ptx::mbarrier_wait(ptx::shared_address(control.weights_empty) + buffer * 8,
                     (state.weights_parity >> buffer & 1) ^ 1);
  state.weights_parity ^= 1u << buffer;

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
  if (threadIdx.x % kGroupThreads == 0) control.rescaled[buffer] = moved && block > 0;
  if (kTwoGroups && block + 1 < state.blocks) ptx::barrier_arrive(kTurnBarrier + (group ^ 1), 2 * kGroupThreads);

  const uint32_t weights = state.base + Shape::kWeightOffset + buffer * Shape::kWeightBytes;
  const uint32_t weights_full = ptx::shared_address(control.weights_full) + buffer * 8;
  if constexpr (Shape::kNative) {
    PerRow<Shape> added = {};
    write_weights<Shape>(score, control.reference, state.warp, weights, added);
    hand_over(weights_full);
    gather_sums<Shape>(added, sum);
  } else {
    write_weights<Shape>(score, control.reference, state.warp, weights, sum);
    hand_over(weights_full);
  }
}

// An item's blocks, all or every other one, scored by fp16 products.
template <class Shape>
__device__ __forceinline__ void score_converted(ScoreState<Shape>& state, const KeyLines& lines, uint32_t queries,
                                                WeightSums<Shape>& sum, Control<Shape>& control) {
  for (int32_t block = 0; block < state.blocks; ++block, state.position.advance()) {
    if (Shape::kScoreGroups == 2 && block % 2 != state.group) continue;
    const int slot = state.position.slot;
    Scores<Shape> score;
    ptx::mbarrier_wait(ptx::shared_address(control.full) + slot * 8, state.position.parity);
    const uint32_t valid_groups = control.blocks[slot].flags & kAllGroups;
    score_block<Shape>(lines, state.base + slot * kSlotBytes, ptx::shared_address(control.empty) + slot * 8, queries,
                       score);
    weigh_block<Shape>(state, block, valid_groups, score, sum, control);
  }
}

// All of an item's blocks by e4m3 products. A block's first ones are under way while the block before is weighed.
template <class Shape>
__device__ __forceinline__ void score_native(ScoreState<Shape>& state, WeightSums<Shape>& sum, Control<Shape>& control) {
  const uint32_t full = ptx::shared_address(control.full), empty = ptx::shared_address(control.empty);
  const bool first_lane = threadIdx.x % 32 == 0;
  Ring<Shape>& position = state.position;
  Scores<Shape> score;
  uint32_t valid_groups;
  for (int32_t block = 0; block < state.blocks; ++block, position.advance()) {
    Scores<Shape> next;
    ptx::mbarrier_wait(full + position.slot * 8, position.parity);
    const uint32_t next_groups = control.blocks[position.slot].flags & kAllGroups;
    const uint32_t slot = ptx::matrix_operand(state.base + position.slot * kSlotBytes);
    // Made anew, lest the compiler keep a register for the descriptor of each product.
    const uint32_t queries = ptx::matrix_operand(state.base + Shape::kQueryOffset);
    start_scores<Shape>(slot, queries, next);
    if (block > 0) weigh_block<Shape>(state, block - 1, valid_groups, score, sum, control);
    finish_scores<Shape>(slot, queries, next);
    if (first_lane) ptx::mbarrier_arrive(empty + position.slot * 8);
    valid_groups = next_groups;
#pragma unroll
    for (int i = 0; i < Shape::kRows / 2; ++i) score[i] = next[i];
  }
  weigh_block<Shape>(state, state.blocks - 1, valid_groups, score, sum, control);
}

template <class Shape>
__device__ __forceinline__ void score_tiles(const DecodeParams& p, int32_t layer, uint32_t base,
                                            unsigned char* queries_pointer, Control<Shape>& control) {
  constexpr bool kTwoGroups = Shape::kScoreGroups == 2;
  const int thread = threadIdx.x;
  const int group = kTwoGroups ? __shfl_sync(0xFFFFFFFF, thread / kGroupThreads, 0) : 0;
  const int warp = __shfl_sync(0xFFFFFFFF, thread / 32 % kGroupWarps, 0);
  const uint32_t queries = ptx::matrix_operand(base + Shape::kQueryOffset);
  const KeyLines lines(warp);
  ScoreState<Shape> state{base, group, warp};
  uint32_t item_parity = 0;

  for (;; item_parity ^= 1) {
    ptx::mbarrier_wait(ptx::shared_address(&control.tile_full), item_parity);
    if (control.tile.rows == 0) return;
    take_queries<Shape>(p, layer, queries_pointer, control);
    ptx::barrier_sync(kScoreBarrier, Shape::kScoreThreads);
    state.visible_to_all = control.visible_end[0];  // the first row belongs to the first query
    state.blocks = block_count(control.tile);
    state.kv_begin = control.tile.kv_begin;
    WeightSums<Shape> sum = {};
    if constexpr (Shape::kNative) {
      score_native<Shape>(state, sum, control);
    } else {
      score_converted<Shape>(state, lines, queries, sum, control);
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
