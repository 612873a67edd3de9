// S^T = K Q^T in e4m3: both operands are multiplied as they lie in shared memory.
//
// The tensor cores keep 14 bits of a sum of such products (instructions.cuh). So they add up 128 columns at most, and
// those sums are added in fp32 registers, in turn from two accumulators, so that the products go on meanwhile. The
// finer part of a query weighs 2^-5, and so do its errors: it is added up in the tensor cores over all columns.
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/decode/sm90/fp8/instructions.cuh"
#include "kernels/decode/sm90/fp8/queries.cuh"
#include "kernels/decode/sm90/fp8/shape.h"

namespace mla::sm90::fp8 {

// Products that the tensor cores add up.
constexpr int kSummed = kLineSteps;

// Adds the product of 32 columns of the keys with a part of the queries.
template <class Shape>
__device__ __forceinline__ void multiply(uint32_t slot, uint32_t queries, int part, int step, bool accumulate,
                                         Scores<Shape>& sums) {
  constexpr int kRopeLines = Shape::kQueryParts * kLatentChunks * Shape::kQueryChunkBytes;
  const int chunk = step / kLineSteps, column = step % kLineSteps * kNativeDepth;
  if (step < kLatentSteps) {
    const int line = (part * kLatentChunks + chunk) * Shape::kQueryChunkBytes + column;
    ptx::e4m3_wgmma(sums,
                    ptx::lines_descriptor<kLineBytes, kLatentGroupBytes>(slot + (chunk * kChunkBytes + column) / 16),
                    ptx::matrix_descriptor(queries + line / 16), accumulate);
  } else {
    const int line = kRopeLines + part * kRope + column;
    ptx::e4m3_wgmma(sums, ptx::lines_descriptor<kRope, kRopeGroupBytes>(slot + (kRopeOffset + column) / 16),
                    ptx::matrix_descriptor(queries + line / 16), accumulate);
  }
}

// What start_scores leaves to finish_scores of the queries, or of their coarser part.
template <class Shape>
constexpr int kFirstStep = Shape::kQueryParts == 1 ? kSummed : 0;

// The first products of a block, up to the next wait in flight: of the finer part all, or of the only one what may be
// added up. They come in two halves, as it is not known how many the tensor cores take before a warp has to wait.
template <class Shape, int kHalf>
__device__ __forceinline__ void start_scores(uint32_t slot_address, uint32_t queries_address, Scores<Shape>& score) {
  constexpr int kSteps = Shape::kQueryParts == 1 ? kSummed : kNativeSteps;
  const uint32_t slot = ptx::matrix_operand(slot_address), queries = ptx::matrix_operand(queries_address);
  if (kHalf == 0) ptx::hold(score);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < (kSteps + 1) / 2; ++i) {
    const int step = kHalf * ((kSteps + 1) / 2) + i;
    if (step < kSteps) multiply<Shape>(slot, queries, Shape::kQueryParts - 1, step, step != 0, score);
  }
  ptx::wgmma_commit();
}

// Some products of the only or the coarser part, as a group that is waited for together.
template <class Shape>
__device__ __forceinline__ void start_sums(uint32_t slot, uint32_t queries, int group, Scores<Shape>& sums) {
  const int first = kFirstStep<Shape> + group * kSummed;
  ptx::hold(sums);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSummed && first + i < kNativeSteps; ++i) {
    multiply<Shape>(slot, queries, 0, first + i, i != 0, sums);
  }
  ptx::wgmma_commit();
}

// The others, after which nothing is in flight and the slot may go back.
template <class Shape>
__device__ __forceinline__ void finish_scores(uint32_t slot_address, uint32_t queries_address, Scores<Shape>& score) {
  constexpr int kGroups = (kNativeSteps - kFirstStep<Shape> + kSummed - 1) / kSummed;
  // Made anew, lest the compiler keep the descriptors of each product in registers.
  const uint32_t slot = ptx::matrix_operand(slot_address), queries = ptx::matrix_operand(queries_address);
  Scores<Shape> sums[2];
  start_sums<Shape>(slot, queries, 0, sums[0]);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    auto& done = sums[group % 2];
    if (group + 1 < kGroups) {
      start_sums<Shape>(slot, queries, group + 1, sums[(group + 1) % 2]);
      ptx::wgmma_wait<1>();
    } else {
      ptx::wgmma_wait<0>();
    }
    if (group == 0) ptx::hold(score);
    ptx::hold(done);
#pragma unroll
    for (int i = 0; i < Shape::kRows / 2; ++i) {
      score[i] = group == 0 && Shape::kQueryParts == 2 ? score[i] * (1 / kFineScale) + done[i] : score[i] + done[i];
    }
  }
}

}  // namespace mla::sm90::fp8
