// The warps that attend to a wide tile. Two warpgroups do all of it: the scores and weights of the blocks in turn, and
// of the output each half of the columns for every block. A group goes
//   scores and weights of its block n, output of block n - 1, output of block n, then on to block n + 2
// and the other one half of that later: so that one multiplies while the other weighs. The references of the exponents
// move in the order of the blocks.
#pragma once

#include "kernels/decode/sm90/fp8/scores.cuh"
#include "kernels/decode/sm90/fp8/wide/output.cuh"
#include "kernels/decode/sm90/fp8/wide/shape.h"

namespace mla::sm90::fp8::wide {

// Barriers of the weights' two buffers, and the parity of each buffer's next use, a bit each.
struct WeightBarriers {
  uint32_t full, empty;
  uint32_t parity = 0;

  __device__ __forceinline__ explicit WeightBarriers(Control<Shape>& control)
      : full(ptx::shared_address(control.weights_full)), empty(ptx::shared_address(control.weights_empty)) {}

  __device__ __forceinline__ void wait_full(int buffer) const {
    ptx::mbarrier_wait(full + buffer * 8, parity >> buffer & 1);
  }
  // Until both groups have read the weights and the factors that were there before.
  __device__ __forceinline__ void wait_empty(int buffer) const {
    ptx::mbarrier_wait(empty + buffer * 8, (parity >> buffer & 1) ^ 1);
  }
};

// The weights of this group's next block, `block` of the item, in buffer `group`.
__device__ __forceinline__ void weigh_block(const WeightBarriers& barriers, int group, int warp, int32_t block,
                                            int32_t first_token, uint32_t valid_groups, uint32_t weights,
                                            Scores<Shape>& score, PerRow<Shape>& sum, Control<Shape>& control) {
  const int other = group ^ 1;
  scale_products<Shape>(control.factor, score);
  if (valid_groups != kAllGroups || control.visible_end[0] - first_token < kBlockTokens) {
    mask_scores<Shape>(control.visible_end, first_token, valid_groups, warp, score);
  }
  barriers.wait_empty(group);
  if (block > 0) {
    barriers.wait_full(other);  // the block before has moved the references
    if (control.rescaled[other]) rescale_sums<Shape>(control.rescale[other], sum);
  }
  const bool moved = ptx::barrier_any(kGroupBarrier + group, kGroupThreads, outgrown<Shape>(score, control.reference));
  if (moved) {
    move_references<Shape>(score, group, control.rescale[group], control);
    rescale_sums<Shape>(control.rescale[group], sum);
  }
  if (threadIdx.x % kGroupThreads == 0) control.rescaled[group] = moved && block > 0;
  write_weights<Shape>(score, NoScales{}, control.reference, warp, weights, sum);
  ptx::fence_async_proxy();
  ptx::mbarrier_arrive_warp(barriers.full + group * 8);
}

// The item's end, by both groups: lse, and the normalised output to where it belongs.
template <class Params>
__device__ __forceinline__ void finish_tile(const Params& p, int group, int warp, const PerRow<Shape>& sum,
                                            const Output<Shape>& out, Control<Shape>& control) {
  share_sums<Shape>(group, sum, control);
  ptx::barrier_sync(kScoreBarrier, Shape::kScoreThreads);
  const int row = threadIdx.x;
  if (row == 0) control.finished = control.tile;
  if (row < Shape::kRows) finish_row<Shape>(p, control.tile, row, control);
  ptx::barrier_sync(kScoreBarrier, Shape::kScoreThreads);
  if (group == 0) ptx::mbarrier_arrive_warp(ptx::shared_address(&control.tile_empty));
  store_tile<Shape>(p, control, group, warp, out);
}

template <class Params>
__device__ __forceinline__ void attend_tiles(const Params& p, int32_t layer, uint32_t base,
                                             unsigned char* queries_pointer, Control<Shape>& control) {
  // Through shuffles the compiler knows what is the same in all lanes, and keeps it in uniform registers.
  const int group = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32 % kGroupWarps, 0);  // of the group
  const uint32_t full = ptx::shared_address(control.full), empty = ptx::shared_address(control.empty);
  const uint32_t queries = ptx::matrix_operand(base + Shape::kQueryOffset);
  const uint32_t all_weights = ptx::matrix_operand(base + Shape::kWeightOffset);
  const uint32_t line = Values::line(group, warp);
  // The left operand's 64 rows are the tokens of two slots; this warp's lie in one of them.
  constexpr int kSlotWarps = kGroupWarps / Shape::kBlockSlots;
  const uint32_t own_part = warp / kSlotWarps;
  const KeyLines keys(warp % kSlotWarps, Shape::kRopeOffset);
  WeightBarriers barriers(control);
  uint32_t first = 0;  // block of the item, by its number in the part

  for (uint32_t item_parity = 0;; item_parity ^= 1) {
    ptx::mbarrier_wait(ptx::shared_address(&control.tile_full), item_parity);
    if (control.tile.rows == 0) return;
    take_queries<Shape>(p, layer, queries_pointer, control);
    ptx::barrier_sync(kScoreBarrier, Shape::kScoreThreads);
    const int32_t blocks = __shfl_sync(0xFFFFFFFF, block_count(control.tile), 0);
    PerRow<Shape> sum = {};
    Output<Shape> out = {};

    for (int32_t block = -1; block < blocks; ++block) {
      const int32_t next = block + 1;
      if (next % 2 == group && next < blocks) {
        const Place place(first + next, own_part);
        Scores<Shape> score;
        ptx::mbarrier_wait(full + place.slot * 8, place.parity);
        multiply_keys<Shape>(keys, base + place.slot * Shape::kSlotBytes, queries, score);
        const uint32_t valid_groups = control.blocks[place.slot].flags & kAllGroups;
        ptx::wgmma_wait<0>();
        weigh_block(barriers, group, warp, next, control.tile.kv_begin + next * kBlockTokens, valid_groups,
                    base + Shape::kWeightOffset + group * Shape::kWeightBytes, score, sum, control);
      }
      if (block < 0) continue;

      const int buffer = block % 2;
      BlockSlots slots;
#pragma unroll
      for (int i = 0; i < Shape::kBlockSlots; ++i) {
        const Place place(first + block, i);
        slots.values[i] = base + place.slot * Shape::kSlotBytes;
        slots.empty[i] = empty + place.slot * 8;
        ptx::mbarrier_wait(full + place.slot * 8, place.parity);
      }
      const int32_t first_token = control.tile.kv_begin + block * kBlockTokens;
      const int32_t visible = control.visible_end[0] - first_token;  // to all rows
      if (visible < kBlockTokens) {
        barriers.wait_full(buffer);  // the scores are made of what is cleared
#pragma unroll
        for (int i = 0; i < Shape::kBlockSlots; ++i) {
          const int32_t before = i * Shape::kSlotTokens;
          clear_values<Shape::kSlotTokens>(slots.values[i], control.tile.kv_end - first_token - before,
                                           visible - before, group);
        }
        ptx::barrier_sync(kOutputBarrier + group, kGroupThreads);
      }
      uint32_t bytes[1][4], fragments[Shape::kOutputBuffers][Shape::kProducts][4];
      load_step(slots, line, 0, bytes);
      expand_values(bytes, fragments[0]);
      barriers.wait_full(buffer);
      if (control.rescaled[buffer]) rescale_output(control.rescale[buffer], out);
      accumulate_block(slots, line, all_weights + buffer * Shape::kWeightBytes / 16, fragments, out);
      ptx::mbarrier_arrive_warp(barriers.empty + buffer * 8);
      barriers.parity ^= 1u << buffer;
    }
    first += blocks;
    const int last = (blocks - 1) % 2;  // whose block may have moved the references after this group's last
    if (group != last && control.rescaled[last]) rescale_sums<Shape>(control.rescale[last], sum);
    finish_tile(p, group, warp, sum, out, control);
  }
}

}  // namespace mla::sm90::fp8::wide
