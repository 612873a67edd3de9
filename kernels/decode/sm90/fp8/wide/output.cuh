// A block's part in the output of a wide tile, O^T += V^T P^T: this group's columns, all rows. output.cuh of narrow
// tiles says where the sums lie.
#pragma once

#include "kernels/decode/sm90/fp8/output.cuh"
#include "kernels/decode/sm90/fp8/wide/shape.h"

namespace mla::sm90::fp8::wide {

// Where a block lies, for the output.
struct BlockSlots {
  uint32_t values[Shape::kBlockSlots];  // addresses
  uint32_t empty[Shape::kBlockSlots];   // their barriers
};

// A step is 32 tokens and 64 columns: one ldmatrix, and the two products that it suffices for.
constexpr int kSlotSteps = kGroupChunks;
constexpr int kSteps = Shape::kBlockSlots * kSlotSteps;

// Left operands, as cached and as multiplied.
template <class Shape>
struct ValueOperands {
  static_assert(kSteps % Shape::kOutputBuffers == 0, "a block starts in the first buffer");
  uint32_t bytes[Shape::kStepsAhead][1][4];
  uint32_t fragments[Shape::kOutputBuffers][2][4];
};

// `line`: of this lane.
template <class Shape, class Values>
__device__ __forceinline__ void load_step(const BlockSlots& slots, uint32_t line, int step,
                                          ValueOperands<Shape>& operands) {
  const int offset = Values::offset(step % kSlotSteps * kChunkLoads);
  ptx::ldmatrix_x4_trans(operands.bytes[step % Shape::kStepsAhead][0], slots.values[step / kSlotSteps] + line + offset);
}

template <class Shape, class Values>
__device__ __forceinline__ void expand_step(const BlockSlots& slots, int step, ValueOperands<Shape>& operands) {
  expand_values(operands.bytes[step % Shape::kStepsAhead], operands.fragments[step % Shape::kOutputBuffers]);
  Values::scale(slots.values[step / kSlotSteps], step % kSlotSteps, operands.fragments[step % Shape::kOutputBuffers]);
}

// The first products' operands. Products of a block before may still run, but those of its last step alone.
template <class Shape, class Values>
__device__ __forceinline__ void start_block(const BlockSlots& slots, uint32_t line, ValueOperands<Shape>& operands) {
#pragma unroll
  for (int step = 0; step < Shape::kStepsAhead; ++step) load_step<Shape, Values>(slots, line, step, operands);
  expand_step<Shape, Values>(slots, 0, operands);
}

// The products of a block that was started, when its weights are there; the last of them still run. `beside`: what else
// there is to do, while the products of each step run. A slot is given back as soon as its values are in registers.
template <class Shape, class Values, class Beside>
__device__ __forceinline__ void accumulate_block(const BlockSlots& slots, uint32_t line, uint32_t weights,
                                                 ValueOperands<Shape>& operands, Output<Shape>& out,
                                                 const Beside& beside) {
  constexpr int kBuffers = Shape::kOutputBuffers;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int next = step + 1;
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ptx::register_wgmma(out[step % kSlotSteps], operands.fragments[step % kBuffers][i],
                          weights + (step / kSlotSteps * 2 + i) * 32 / 16, true);
    }
    ptx::wgmma_commit();
    if (step + Shape::kStepsAhead < kSteps) load_step<Shape, Values>(slots, line, step + Shape::kStepsAhead, operands);
    beside(step);
    if (next >= kBuffers) ptx::wgmma_wait<kBuffers - 1>();
    if (next < kSteps) {
      expand_step<Shape, Values>(slots, next, operands);
      if (next % kSlotSteps == kSlotSteps - 1) ptx::mbarrier_arrive_warp(slots.empty[next / kSlotSteps]);
    }
  }
}

}  // namespace mla::sm90::fp8::wide
