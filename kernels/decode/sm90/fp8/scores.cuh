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
  const int row = ptx::thread_index<Shape::kTight>(), lane = row % 32, g = lane / 4, t = lane % 4;
  float* by_row = control.by_warp[group][row % kGroupThreads / 32];
  if constexpr (Shape::kTight) {
    if (2 * lane < Shape::kRows) *reinterpret_cast<float2*>(by_row + 2 * lane) = {sum[0], sum[1]};
  } else {
#pragma unroll
    for (int j = 0; j < Shape::kRowGroups; ++j) {
      float2 total;
      total.x = combine_over_g(sum[2 * j], [](float a, float b) { return a + b; });
      total.y = combine_over_g(sum[2 * j + 1], [](float a, float b) { return a + b; });
      if (g == 0) *reinterpret_cast<float2*>(by_row + j * 8 + 2 * t) = total;
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
  int group, warp;          // the warpgroup, the warp in it
  Ring<Shape> position;     // of the item's next block, whoever's it is
  uint32_t weights_parity;  // of each buffer's next use, a bit each
};

// What this warp has written for the output's products is there.
template <class Shape>
__device__ __forceinline__ void hand_over(uint32_t barrier) {
  ptx::fence_async_proxy();
  __syncwarp();
  if (ptx::thread_index<Shape::kTight>() % 32 == 0) ptx::mbarrier_arrive(barrier);
}

// Makes weights of a block's scores and hands them to the output warps. `last`: of its item. On the way, behind the
// vote on the references, calls `between`.
template <class Shape, class Between>
__device__ __forceinline__ void weigh_block(ScoreState<Shape>& state, int32_t block, bool last,
                                            const Scores<Shape>& score, WeightSums<Shape>& sum, Control<Shape>& control,
                                            Between between) {
  constexpr bool kTwoGroups = Shape::kScoreGroups == 2;
  const int buffer = block % 2, group = state.group;
  // The output warps have read the weights and the factors that were here before.
  ptx::mbarrier_wait(ptx::shared_address(control.weights_empty) + buffer * 8, (state.weights_parity >> buffer & 1) ^ 1);
  state.weights_parity ^= 1u << buffer;

  // The references move in the order of the blocks: a group waits for its turn.
  if (kTwoGroups && block > 0) {
    ptx::barrier_sync(kTurnBarrier + group, 2 * kGroupThreads);
    if (control.rescaled[buffer ^ 1]) rescale_sums<Shape>(control.rescale[buffer ^ 1], sum);
  }
  const bool moved = ptx::barrier_any(kGroupBarrier + group, kGroupThreads, outgrown<Shape>(score, control.reference));
  if (moved) {
    move_references<Shape>(score, group, control.rescale[buffer], control);
    rescale_sums<Shape>(control.rescale[buffer], sum);
  }
  if (ptx::thread_index<Shape::kTight>() % kGroupThreads == 0) control.rescaled[buffer] = moved && block > 0;
  if (kTwoGroups && !last) ptx::barrier_arrive(kTurnBarrier + (group ^ 1), 2 * kGroupThreads);

  between();
  const uint32_t weights = state.base + Shape::kWeightOffset + buffer * Shape::kWeightBytes;
  const uint32_t weights_full = ptx::shared_address(control.weights_full) + buffer * 8;
  if constexpr (Shape::kTight) {
    PerRow<Shape> added = {};
    write_weights<Shape>(score, control.reference, state.warp, weights, added);
    hand_over<Shape>(weights_full);
    gather_sums<Shape>(added, sum);
  } else {
    write_weights<Shape>(score, control.reference, state.warp, weights, sum);
    hand_over<Shape>(weights_full);
  }
}

// An item's blocks, all or every other one, by fp16 products.
template <class Shape>
__device__ __forceinline__ void score_converted(ScoreState<Shape>& state, const KeyLines& lines, uint32_t queries,
                                                WeightSums<Shape>& sum, Control<Shape>& control) {
  const uint32_t full = ptx::shared_address(control.full), empty = ptx::shared_address(control.empty);
  const int32_t visible_to_all = control.visible_end[0];  // the first row belongs to the first query
  const int32_t blocks = block_count(control.tile), kv_begin = control.tile.kv_begin;
  Ring<Shape>& position = state.position;
  for (int32_t block = 0; block < blocks; ++block, position.advance()) {
    if (Shape::kScoreGroups == 2 && block % 2 != state.group) continue;
    const int32_t first_token = kv_begin + block * kBlockTokens;
    Scores<Shape> score;
    ptx::mbarrier_wait(full + position.slot * 8, position.parity);
    const uint32_t valid_groups = control.blocks[position.slot].flags & kAllGroups;
    score_block<Shape>(lines, state.base + position.slot * kSlotBytes, empty + position.slot * 8, queries, score);
    scale_products<Shape>(control.factor, score);
    if (valid_groups != kAllGroups || visible_to_all - first_token < kBlockTokens) {
      mask_scores<Shape>(control.visible_end, first_token, valid_groups, state.warp, score);
    }
    weigh_block<Shape>(state, block, block + 1 == blocks, score, sum, control, [] {});
  }
}

// The block before state.position, from products to weights. Only then its slot is given back, which the output warps
// need longer anyway: so what the loading warp says of it can be read here.
template <class Shape, class Between>
__device__ __forceinline__ void weigh_last_block(ScoreState<Shape>& state, int32_t block, Scores<Shape>& score,
                                                 WeightSums<Shape>& sum, Control<Shape>& control, Between between) {
  const int slot = (state.position.slot == 0 ? Shape::kSlots : state.position.slot) - 1;
  const BlockInfo& info = control.blocks[slot];
  const uint32_t valid_groups = info.flags & kAllGroups;
  scale_products<Shape>(control.factor, score);
  if (valid_groups != kAllGroups || info.visible < kBlockTokens) {
    mask_scores<Shape>(control.visible_end, control.tile.kv_begin + block * kBlockTokens, valid_groups, state.warp,
                       score);
  }
  weigh_block<Shape>(state, block, false, score, sum, control, between);
  if (ptx::thread_index<Shape::kTight>() % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(control.empty) + slot * 8);
}

// An item's blocks by e4m3 products. A block's first ones are under way while the block before is weighed.
template <class Shape>
__device__ __forceinline__ void score_native(ScoreState<Shape>& state, WeightSums<Shape>& sum,
                                             Control<Shape>& control) {
  Ring<Shape>& position = state.position;
  Scores<Shape> score;
  int32_t block = 0;
  for (bool last = false; !last; ++block, position.advance()) {
    Scores<Shape> next;
    ptx::mbarrier_wait(ptx::shared_address(control.full) + position.slot * 8, position.parity);
    const uint32_t slot = state.base + position.slot * kSlotBytes, queries = state.base + Shape::kQueryOffset;
    start_scores<Shape, 0>(slot, queries, next);
    const auto start_rest = [&] { start_scores<Shape, 1>(slot, queries, next); };
    if (block == 0) {
      start_rest();
    } else {
      weigh_last_block<Shape>(state, block - 1, score, sum, control, start_rest);
    }
    finish_scores<Shape>(slot, queries, next);
    last = (control.blocks[position.slot].flags & kLast) != 0;
#pragma unroll
    for (int i = 0; i < Shape::kRows / 2; ++i) score[i] = next[i];
  }
  weigh_last_block<Shape>(state, block - 1, score, sum, control, [] {});
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
  ScoreState<Shape> state{base, group, warp, {}, 0};
  uint32_t item_parity = 0;

  for (;; item_parity ^= 1) {
    ptx::mbarrier_wait(ptx::shared_address(&control.tile_full), item_parity);
    if (control.tile.rows == 0) return;
    take_queries<Shape>(p, layer, queries_pointer, control);
    ptx::barrier_sync(kScoreBarrier, Shape::kScoreThreads);
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
