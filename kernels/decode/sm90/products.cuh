// The scores of a block of narrow tiles: S^T = K Q^T, by one warpgroup.
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/decode/sm90/shape.h"

namespace mla::sm90 {

// A lane's share of 64 tokens x kRows.
template <class Shape>
using Scores = float[Shape::kRows / 2];

// Waits for a block's slots in turn and multiplies it with the queries. Returns where its rope keys lie, which the
// weights will replace.
template <class Element, class Params, class Shape>
__device__ __forceinline__ uint32_t score_block(const Params& p, uint32_t ring, uint32_t queries, uint32_t full,
                                                Ring<Shape>& position, Scores<Shape>& score) {
  uint32_t rope = 0;
#pragma unroll
  for (int i = 0; i < kBlockSlots; ++i) {
    ptx::mbarrier_wait(full + position.slot * 8, position.parity);
    order_arrived_keys(p);
    const uint32_t slot = ring + position.slot * kSlotBytes;
    const uint32_t keys = ptx::matrix_operand(slot);
    ptx::wgmma_fence();  // after every wait, else the products are run one by one
#pragma unroll
    for (int c = 0; c < kSlotChunks; ++c) {
#pragma unroll
      for (int k = 0; k < kChunkColumns / 16; ++k) {
        const uint32_t key = keys + (c * kChunkBytes + k * 32) / 16;
        const uint32_t query = queries + ((i * kSlotChunks + c) * Shape::kQueryChunkBytes + k * 32) / 16;
        ptx::wgmma<Element, /*kTransposed=*/false>(score, key, query, (i | c | k) != 0);
      }
    }
    rope = slot + (kSlotChunks - 1) * kChunkBytes;
    position.advance();
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  return rope;
}

}  // namespace mla::sm90
