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

constexpr int kSlotSteps = kGroupChunks;  // of 32 tokens and 64 columns each
constexpr int kSteps = Shape::kBlockSlots * kSlotSteps;

// `line`: of this lane, Values::line.
__device__ __forceinline__ void load_step(const BlockSlots& slots, uint32_t line, int step, uint32_t (&bytes)[1][4]) {
  ptx::ldmatrix_x4_trans(bytes[0], slots.values[step / kSlotSteps] + line + step % kSlotSteps * kChunkBytes);
}

// When the weights are there. A slot is given back as soon as its values are in registers.
__device__ __forceinline__ void accumulate_block(const BlockSlots& slots, uint32_t line, uint32_t weights,
                                                 uint32_t (&fragments)[Shape::kOutputBuffers][Shape::kProducts][4],
                                                 Output<Shape>& out) {
  constexpr int kBuffers = Shape::kOutputBuffers;
  uint32_t bytes[1][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int next = step + 1;
    if (next < kSteps) load_step(slots, line, next, bytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Shape::kProducts; ++i) {
      const int depth = step / kSlotSteps * Shape::kProducts + i;  // by 16 tokens
      ptx::register_wgmma(out[step % kSlotSteps], fragments[step % kBuffers][i], weights + depth * 32 / 16, true);
    }
    ptx::wgmma_commit();
    if (next < kSteps) {
      if (next >= kBuffers) ptx::wgmma_wait<kBuffers - 1>();
      expand_values(bytes, fragments[next % kBuffers]);
      if (next % kSlotSteps == kSlotSteps - 1) ptx::mbarrier_arrive_warp(slots.empty[next / kSlotSteps]);
    }
  }
  ptx::wgmma_wait<0>();
}

}  // namespace mla::sm90::fp8::wide
