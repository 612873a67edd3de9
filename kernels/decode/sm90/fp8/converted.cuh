// S^T = K Q^T in fp16: the keys pass through registers. ldmatrix brings their bytes in the order of the product's left
// operand, and each pair of bytes becomes a pair of fp16.
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/decode/sm90/fp8/instructions.cuh"
#include "kernels/decode/sm90/fp8/shape.h"

namespace mla::sm90::fp8 {

// Where this lane's rows of the left operand lie in a slot: lanes 0-15 address the warp's tokens at 16 columns, lanes
// 16-31 at the next 16. 32 columns on is bit 5 flipped, four times in a line.
struct KeyLines {
  uint32_t latent, rope;

  __device__ __forceinline__ explicit KeyLines(int warp) {
    const int lane = threadIdx.x % 32, unit = lane / 16, line = lane % 8, group = 2 * warp + lane / 8 % 2;
    latent = group * kLatentGroupBytes + line * kLineBytes + ((unit ^ line) << 4);
    rope = kRopeOffset + group * kRopeGroupBytes + line * kRope + ((unit ^ (line / 2)) << 4);
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

// The products of a block with the queries; its slot is given back on the way. The next bytes are fetched, and become
// operands, while the products before them run.
template <class Shape>
__device__ __forceinline__ void score_block(const KeyLines& lines, uint32_t slot, uint32_t empty, uint32_t queries,
                                            Scores<Shape>& score) {
  constexpr int kSteps = kWidth / kProductDepth / Shape::kProducts;
  constexpr int kLoads = Shape::kLoads, kBuffers = Shape::kScoreBuffers;
  uint32_t bytes[kLoads][4], fragments[kBuffers][Shape::kProducts][4];
  load_key_bytes(lines, slot, 0, bytes);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step >= kBuffers) ptx::wgmma_wait<kBuffers - 1>();
    expand_keys(bytes, fragments[step % kBuffers]);
    if (step + 1 < kSteps) load_key_bytes(lines, slot, (step + 1) * kLoads, bytes);
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
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty);
  ptx::wgmma_wait<0>();
}

}  // namespace mla::sm90::fp8
