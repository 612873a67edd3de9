// The warps that attend to a wide tile. Two warpgroups do all of it: the scores and weights of the blocks in turn, and
// of the output each half of the columns for every block. A group goes
//   scores of its block n, output of block n - 1 and between its products the weights of n, output of n, on to n + 2
// and the other one half of that later: so that one multiplies while the other weighs. The references of the exponents
// move in the order of the blocks.
#pragma once

#include "kernels/decode/sm90/fp8/wide/output.cuh"
#include "kernels/decode/sm90/fp8/wide/scores.cuh"
#include "kernels/decode/sm90/fp8/wide/shape.h"

namespace mla::sm90::fp8::wide {

// Barriers of the weights' two buffers, and the parity of each buffer's next use, a bit each.
struct WeightBarriers {
  uint32_t full, empty;
  uint32_t parity = 0;

  template <class AnyControl>
  __device__ __forceinline__ explicit WeightBarriers(AnyControl& control)
      : full(ptx::shared_address(control.weights_full)), empty(ptx::shared_address(control.weights_empty)) {}

  __device__ __forceinline__ void wait_full(int buffer) const {
    ptx::mbarrier_wait(full + buffer * 8, parity >> buffer & 1);
  }
  // Until both groups have read the weights and the factors that were there before.
  __device__ __forceinline__ void wait_empty(int buffer) const {
    ptx::mbarrier_wait(empty + buffer * 8, (parity >> buffer & 1) ^ 1);
  }
  // This warp has read them.
  __device__ __forceinline__ void give_back(int buffer) {
    ptx::mbarrier_arrive_warp(empty + buffer * 8);
    parity ^= 1u << buffer;
  }
};

// A warp's view of the CTA.
template <class Shape, class Keys, class Values>
struct Attention {
  int group, warp;  // `warp`: of the group
  uint32_t base;
  Control<Shape>& control;
  uint32_t full, empty;
  uint32_t queries, weights;  // as right operands
  // The left operand's 64 rows are the tokens of two slots; this warp's lie in one of them.
  static constexpr int kSlotWarps = kGroupWarps / Shape::kBlockSlots;
  static constexpr bool kLifts = !std::is_same_v<typename Keys::Scales, NoScales>;
  uint32_t own_part;
  uint32_t value_line;
  WeightBarriers barriers;
  uint32_t first = 0;  // block of the item, by its number in the part

  __device__ __forceinline__ Attention(int group, int warp, uint32_t base, Control<Shape>& control)
      : group(group),
        warp(warp),
        base(base),
        control(control),
        full(ptx::shared_address(control.full)),
        empty(ptx::shared_address(control.empty)),
        queries(ptx::matrix_operand(base + Shape::kQueryOffset)),
        weights(ptx::matrix_operand(base + Shape::kWeightOffset)),
        own_part(warp / kSlotWarps),
        value_line(Values::line(group, warp)),
        barriers(control) {}

  // Where this lane stores its group's weights. Found anew for each block, since registers are short.
  __device__ __forceinline__ uint32_t weight_target() const {
    return base + Shape::kWeightOffset + group * Shape::kWeightBytes + weight_line(warp);
  }

  __device__ __forceinline__ int32_t first_token(int32_t block) const {
    return control.tile.kv_begin + block * kBlockTokens;
  }

  __device__ __forceinline__ Keys keys() const { return Keys(warp % kSlotWarps); }

  // Where this warp's tokens of the block lie.
  __device__ __forceinline__ uint32_t own_slot(int32_t block) const {
    return base + Place<Shape>(first + block, own_part).slot * Shape::kSlotBytes;
  }

  // As soon as the block's keys are there, the operands of its first products.
  __device__ __forceinline__ void start_scores(int32_t block, KeyOperands<Shape>& operands) const {
    const Place<Shape> place(first + block, own_part);
    ptx::mbarrier_wait(full + place.slot * 8, place.parity);
    Keys::template await_scales<Shape>(base, place.slot, place.parity);
    start_keys<Shape>(keys(), base + place.slot * Shape::kSlotBytes, operands);
  }

  // Products, or where tokens have scales lifted scores.
  __device__ __forceinline__ void score_block(int32_t block, KeyOperands<Shape>& operands, Scores<Shape>& score) const {
    const Place<Shape> place(first + block, own_part);
    multiply_keys<Shape, true>(keys(), base + place.slot * Shape::kSlotBytes, queries, operands, score);
    ptx::wgmma_wait<0>();
    if constexpr (kLifts) {
      lift_products<Shape>(control.factor, keys().scales(base + place.slot * Shape::kSlotBytes), score);
    }
  }

  // Products become scores relative to the references, -inf where a row does not see a token.
  __device__ __forceinline__ void relate_block(int32_t block, Scores<Shape>& score) const {
    const Place<Shape> place(first + block, own_part);
    relate_products<Shape, kLifts>(control.factor, control.reference, score);
    // After that, since a factor may be anything.
    const uint32_t valid_groups = control.blocks[place.slot].flags & kAllGroups;
    if (valid_groups != kAllGroups || control.visible_end[0] - first_token(block) < kBlockTokens) {
      mask_scores<Shape>(control.visible_end, first_token(block), valid_groups, warp, score);
    }
  }

  // The references that this group's block is weighed against, and its scores relative to them. The block before has
  // moved them by now.
  __device__ __forceinline__ void settle_references(int32_t block, Scores<Shape>& score, PerRow<Shape>& sum) const {
    const uint32_t before = block > 0 ? control.rescaled[group ^ 1] : kSomeUnset;
    if (before & kRescaled) rescale_sums<Shape>(control.rescale[group ^ 1], sum);
    barriers.wait_empty(group);
    relate_block(block, score);
    uint32_t message = 0;
    if (ptx::barrier_any(kGroupBarrier + group, kGroupThreads, outgrown<Shape>(score) || (before & kSomeUnset))) {
      ptx::hold(score);  // or the vote's maxima would stay in registers
      message = move_references<Shape>(group, control.rescale[group], score, control);
      if (message & kRescaled) rescale_sums<Shape>(control.rescale[group], sum);
    }
    if (threadIdx.x % kGroupThreads == 0) control.rescaled[group] = message;
  }

  __device__ __forceinline__ void hand_over_weights(const Scores<Shape>& score, uint32_t target) const {
    store_weights<Shape>(score, Shape::kRowGroups - 1, target);
    ptx::fence_async_proxy();
    ptx::mbarrier_arrive_warp(barriers.full + group * 8);
  }

  __device__ __forceinline__ BlockSlots wait_for(int32_t block) const {
    BlockSlots slots;
#pragma unroll
    for (int i = 0; i < Shape::kBlockSlots; ++i) {
      const Place<Shape> place(first + block, i);
      slots.values[i] = base + place.slot * Shape::kSlotBytes;
      slots.empty[i] = empty + place.slot * 8;
      ptx::mbarrier_wait(full + place.slot * 8, place.parity);
      Keys::template await_scales<Shape>(base, place.slot, place.parity);
    }
    return slots;
  }

  // Whether something of a block's values has to be cleared before they are multiplied.
  __device__ __forceinline__ bool clears(int32_t block) const {
    return Values::kClears && control.visible_end[0] - first_token(block) < kBlockTokens;
  }

  // As soon as the block is there, the operands of its first products. Where it is still to be cleared they are fetched
  // again behind that; a branch here costs 2% of the time, but racecheck would report what is then not used.
  __device__ __forceinline__ void start_values(int32_t block, const BlockSlots& slots,
                                               ValueOperands<Shape>& operands) const {
    if (ptx::kWarpArrivals > 1 && clears(block)) return;
    start_block<Shape, Values>(slots, value_line, operands);
  }

  // Until a block's weights are there. `operands`: of its first products.
  __device__ __forceinline__ void await_weights(int32_t block, const BlockSlots& slots,
                                                ValueOperands<Shape>& operands) const {
    barriers.wait_full(block % 2);
    if (clears(block)) clear_block(block, slots, operands);
  }

  // docs/hopper.md, "Masks". The scores have been made of what is cleared.
  __device__ __forceinline__ void clear_block(int32_t block, const BlockSlots& slots,
                                              ValueOperands<Shape>& operands) const {
#pragma unroll
    for (int i = 0; i < Shape::kBlockSlots; ++i) {
      const int32_t first = first_token(block) + i * Shape::kSlotTokens;
      clear_values<Shape::kSlotTokens>(slots.values[i], control.tile.kv_end - first, control.visible_end[0] - first,
                                       group);
    }
    ptx::barrier_sync(kOutputBarrier + group, kGroupThreads);
    start_block<Shape, Values>(slots, value_line, operands);
  }

  template <class Beside>
  __device__ __forceinline__ void accumulate(int32_t block, const BlockSlots& slots, ValueOperands<Shape>& operands,
                                             Output<Shape>& out, const Beside& beside) const {
    const int buffer = block % 2;
    if (control.rescaled[buffer] & kRescaled) rescale_output(control.rescale[buffer], out);
    accumulate_block<Shape, Values>(slots, value_line, weights + buffer * Shape::kWeightBytes / 16, operands, out,
                                    beside);
  }
};

struct Nothing {
  __device__ __forceinline__ void operator()(int) const {}
};

// All blocks of an item. Its sums are then relative to the last references.
template <class Shape, class Keys, class Values>
__device__ __forceinline__ void attend_blocks(Attention<Shape, Keys, Values>& attention, int32_t blocks,
                                              PerRow<Shape>& sum, Output<Shape>& out) {
  // The first values before the references are settled, if registers are left for them.
  constexpr bool kStartsEarly = Shape::kStepsAhead > 1;
  const int group = attention.group;
  Control<Shape>& control = attention.control;
  ValueOperands<Shape> values;
  BlockSlots slots;
  KeyOperands<Shape> key_operands;
  int32_t block = group;
  if (block < blocks) attention.start_scores(block, key_operands);
  for (; block < blocks; block += 2) {
    Scores<Shape> score;
    attention.score_block(block, key_operands, score);
    if (block > 0) {
      slots = attention.wait_for(block - 1);
      if (kStartsEarly) attention.start_values(block - 1, slots, values);
      attention.await_weights(block - 1, slots, values);
    }
    attention.settle_references(block, score, sum);
    const uint32_t target = attention.weight_target();
    const auto scales = attention.keys().scales(attention.own_slot(block));
    const auto weigh = [&](int j) { weigh_rows<Shape>(score, scales, j, target, sum); };
    if (block > 0) {
      if (!kStartsEarly) attention.start_values(block - 1, slots, values);
      static_assert(kSteps == Shape::kRowGroups);
      attention.accumulate(block - 1, slots, values, out, weigh);
    } else {
#pragma unroll
      for (int j = 0; j < Shape::kRowGroups; ++j) weigh(j);
    }
    slots = attention.wait_for(block);
    attention.start_values(block, slots, values);
    ptx::wgmma_wait<0>();
    if (block > 0) attention.barriers.give_back(group ^ 1);
    attention.hand_over_weights(score, target);

    attention.await_weights(block, slots, values);
    attention.accumulate(block, slots, values, out, Nothing{});
    if (block + 2 < blocks) attention.start_scores(block + 2, key_operands);
    ptx::wgmma_wait<0>();
    attention.barriers.give_back(group);
  }
  if (block == blocks) {  // the last block is the other group's
    slots = attention.wait_for(block - 1);
    attention.start_values(block - 1, slots, values);
    attention.await_weights(block - 1, slots, values);
    attention.accumulate(block - 1, slots, values, out, Nothing{});
    ptx::wgmma_wait<0>();
    attention.barriers.give_back(group ^ 1);
    if (control.rescaled[group ^ 1] & kRescaled) rescale_sums<Shape>(control.rescale[group ^ 1], sum);
  }
  attention.first += blocks;
}

// The item's end, by both groups: lse, and the normalised output to where it belongs.
template <class Shape, class Params>
__device__ __forceinline__ void finish_tile(const Params& p, int group, int warp, const PerRow<Shape>& sum,
                                            const Output<Shape>& out, Control<Shape>& control) {
  share_sums<Shape>(group, warp, sum, control);
  ptx::barrier_sync(kScoreBarrier, Shape::kScoreThreads);
  const int row = threadIdx.x;
  if (row == 0) control.finished = control.tile;
  if (row < Shape::kRows) finish_row<Shape>(p, control.tile, row, control);
  ptx::barrier_sync(kScoreBarrier, Shape::kScoreThreads);
  if (group == 0) ptx::mbarrier_arrive_warp(ptx::shared_address(&control.tile_empty));
  store_tile<Shape>(p, control, group, warp, out);
}

// `Keys`, `Values`: how a warp reads a block.
template <class Shape, class Keys, class Values, class Params>
__device__ __forceinline__ void attend_tiles(const Params& p, int32_t layer, uint32_t base,
                                             unsigned char* queries_pointer, Control<Shape>& control) {
  // Through shuffles the compiler knows what is the same in all lanes, and keeps it in uniform registers.
  const int group = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32 % kGroupWarps, 0);  // of the group
  Attention<Shape, Keys, Values> attention(group, warp, base, control);
  for (uint32_t item_parity = 0;; item_parity ^= 1) {
    ptx::mbarrier_wait(ptx::shared_address(&control.tile_full), item_parity);
    if (control.tile.rows == 0) return;
    take_queries<Shape>(p, layer, queries_pointer, control);
    if (threadIdx.x < Shape::kRows) control.reference[threadIdx.x] = kUnset;
    ptx::barrier_sync(kScoreBarrier, Shape::kScoreThreads);
    PerRow<Shape> sum = {};
    Output<Shape> out = {};
    attend_blocks(attention, __shfl_sync(0xFFFFFFFF, block_count(control.tile), 0), sum, out);
    finish_tile<Shape>(p, group, warp, sum, out, control);
  }
}

}  // namespace mla::sm90::fp8::wide
