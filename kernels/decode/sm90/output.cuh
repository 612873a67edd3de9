// The output warps: O^T += V^T P^T, where V^T are the latent chunks of the block's keys, transposed by wgmma. Each of
// the two warpgroups owns every other chunk of 64 columns.
//
// Columns of the latent are the rows of O^T, (query, head) rows its columns: lane 4 * g + t of a group's warp w has of
// its i-th chunk the columns 16w + g and 16w + g + 8 with the rows 8j + 2t and 8j + 2t + 1.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/decode/sm90/rescale.cuh"
#include "kernels/decode/sm90/shape.h"

namespace mla::sm90 {

constexpr int kGroupChunks = kLatentChunks / kOutputGroups;

template <class Shape>
using Output = float[kGroupChunks][Shape::kRows / 2];

// The block's part of the output. Its slots are given back one by one, as soon as this group has read its chunks.
template <class Element, class Shape>
__device__ __forceinline__ void accumulate_block(uint32_t ring, uint32_t empty, const Ring<Shape>& block, int group,
                                                 Output<Shape>& out) {
  const int slots[kBlockSlots] = {block.slot, block.slot_after(1), block.slot_after(2)};
  uint32_t operands[kBlockSlots];
#pragma unroll
  for (int i = 0; i < kBlockSlots; ++i) operands[i] = ptx::matrix_operand(ring + slots[i] * kSlotBytes);
  const uint32_t weights = operands[kBlockSlots - 1] + (kSlotChunks - 1) * kChunkBytes / 16;
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kGroupChunks; ++i) {
    const int even = kOutputGroups * i, odd = even + 1;
    const uint32_t values = group == 0 ? operands[even / kSlotChunks] + even % kSlotChunks * kChunkBytes / 16
                                       : operands[odd / kSlotChunks] + odd % kSlotChunks * kChunkBytes / 16;
#pragma unroll
    for (int k = 0; k < kBlockTokens / 16; ++k) {
      ptx::wgmma<Element, /*kTransposed=*/true>(out[i], values + k * 16 * kLineBytes / 16, weights + k * 32 / 16, true);
    }
    ptx::wgmma_commit();
  }
  // Chunks 0 to 2 are in the first two of a group's four products, 3 to 5 in the first three.
  ptx::wgmma_wait<2>();
  ptx::mbarrier_arrive_warp(empty + slots[0] * 8);
  ptx::wgmma_wait<1>();
  ptx::mbarrier_arrive_warp(empty + slots[1] * 8);
  ptx::wgmma_wait<0>();
  ptx::mbarrier_arrive_warp(empty + slots[2] * 8);
}

// Normalised, to the rows that exist. Each store of a warp fills whole sectors of a partial.
template <class Target, class Shape>
__device__ __forceinline__ void store_output(Target* target, int32_t rows, const float* inverse, int group,
                                             const Output<Shape>& out) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32 % kGroupWarps;
  target += group * kChunkColumns + warp * 16 + g;
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    const int row = j * 8 + 2 * t;
    const float2 factor = *reinterpret_cast<const float2*>(inverse + row);
#pragma unroll
    for (int i = 0; i < kGroupChunks; ++i) {
      Target* first = target + int64_t{row} * kLatent + i * kOutputGroups * kChunkColumns;
      if (row < rows) {
        first[0] = from_float<Target>(out[i][4 * j] * factor.x);
        first[8] = from_float<Target>(out[i][4 * j + 2] * factor.x);
      }
      if (row + 1 < rows) {
        first[kLatent] = from_float<Target>(out[i][4 * j + 1] * factor.y);
        first[kLatent + 8] = from_float<Target>(out[i][4 * j + 3] * factor.y);
      }
    }
  }
}

template <class Element, class Params, class Shape>
__device__ __forceinline__ void accumulate_tiles(const Params& p, uint32_t ring, Control<Shape>& control) {
  const int group = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / kGroupThreads - Shape::kScoreGroups, 0);
  const uint32_t empty = ptx::shared_address(control.empty);
  const uint32_t weights_full = ptx::shared_address(control.weights_full);
  Ring<Shape> position;
  uint32_t parity = 0, item_parity = 0;
  int buffer = 0;
  Output<Shape> out = {};

  for (;;) {
    ptx::mbarrier_wait(weights_full + buffer * 8, parity);
    const uint32_t message = control.messages[buffer];
    if (message & kStop) break;
    if (message & kRescale) rescale_output(control.rescale[buffer], out);
    accumulate_block<Element>(ring, empty, position, group, out);
    position.skip(1);
    parity ^= buffer;  // a new round after the second buffer
    buffer ^= 1;

    if (message & kLast) {
      ptx::mbarrier_wait(ptx::shared_address(&control.sums_full), item_parity);
      item_parity ^= 1;
      const int32_t rows = control.finished.rows, partial = control.finished.partial;
      if (partial < 0) {
        store_output<Element, Shape>(static_cast<Element*>(p.out) + control.finished.first_row * kLatent, rows,
                                     control.inverse, group, out);
      } else {
        store_output<float, Shape>(
            p.partial_out + partial_row(p, partial, control.finished.first_row, Shape::kRows) * kLatent, rows,
            control.inverse, group, out);
      }
      ptx::mbarrier_arrive_warp(ptx::shared_address(&control.sums_empty));
#pragma unroll
      for (int i = 0; i < kGroupChunks; ++i) {
#pragma unroll
        for (int j = 0; j < Shape::kRows / 2; ++j) out[i][j] = 0;
      }
    }
  }
}

}  // namespace mla::sm90
