// A warp's 16 queries against a block: S = Q K^T, the online softmax, O += P V.
//
// Lane 4 * g + t has rows g and g + 8; of the scores keys 8j + 2t and 8j + 2t + 1, in score[4j], score[4j + 1] for the
// upper row and score[4j + 2], score[4j + 3] for the lower one; of the output likewise the columns.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/prefill/generic/loads.cuh"
#include "kernels/prefill/generic/shape.h"
#include "kernels/prefill/rows.cuh"

namespace mla::generic_prefill {

using prefill_rows::Output;
using prefill_rows::Rows;
using Scores = float[kBlockKeys / 2];

// Four neighbouring sums, as a product's D.
__device__ __forceinline__ float (&product(float* sums))[4] { return *reinterpret_cast<float (*)[4]>(sums); }

// A key's line is B transposed, as ldmatrix wants it. Matrices: keys 0-7 columns 0-7, keys 0-7 columns 8-15, keys 8-15
// columns 0-7, keys 8-15 columns 8-15: b0 and b1 of two neighbouring products.
template <class Element>
__device__ __forceinline__ void score_block(const Queries& queries, uint32_t keys, Scores& score) {
  const int lane = threadIdx.x % 32, swizzle = lane % 8;
  const uint32_t line = keys + (lane / 16 * 8 + lane % 8) * kKeyLine;
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i) score[i] = 0;
#pragma unroll
  for (int step = 0; step < kQuerySteps; ++step) {
    const uint32_t chunk = (2 * step + lane / 8 % 2) ^ swizzle;
#pragma unroll
    for (int pair = 0; pair < kBlockKeys / 16; ++pair) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, line + pair * 16 * kKeyLine + chunk * 16);
      ptx::mma_m16n8k16<Element>(product(score + 8 * pair), queries[step], b[0], b[1]);
      ptx::mma_m16n8k16<Element>(product(score + 8 * pair + 4), queries[step], b[2], b[3]);
    }
  }
}

// Scaled, to exponents of 2; -inf where a row does not see a key: `visible` of the block's each row sees, but for those
// whose bit is clear.
template <bool kMasked>
__device__ __forceinline__ void scale_scores(float scale, const int32_t (&visible)[2], const KeyBits& bits,
                                             Scores& score) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i) {
    const int key = i / 4 * 8 + 2 * t + i % 2;
    const bool seen =
        !kMasked || (key < visible[i % 4 / 2] && bits.words[i / 16] >> (i / 4 % 4 * 8 + 2 * t + i % 2) & 1);
    score[i] = seen ? score[i] * scale : -INFINITY;
  }
}

// Scores become weights. What was summed before is rescaled.
__device__ __forceinline__ void weigh_scores(Scores& score, Rows& rows, Output& out) {
  float factor[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float highest = fmaxf(score[2 * e], score[2 * e + 1]);
#pragma unroll
    for (int i = 4; i < kBlockKeys / 2; i += 4) {
      highest = fmaxf(highest, fmaxf(score[i + 2 * e], score[i + 2 * e + 1]));
    }
    highest = fmaxf(rows.reference[e], combine_over_t(highest, fmaxf));
    factor[e] = ptx::exp2_approximate(rows.reference[e] - highest);
    rows.reference[e] = highest;
    float sum = 0;
#pragma unroll
    for (int i = 2 * e; i < kBlockKeys / 2; i += 4) {
      score[i] = ptx::exp2_approximate(score[i] - highest);
      score[i + 1] = ptx::exp2_approximate(score[i + 1] - highest);
      sum += score[i] + score[i + 1];
    }
    rows.sum[e] = rows.sum[e] * factor[e] + sum;
  }
#pragma unroll
  for (int i = 0; i < kNope / 2; ++i) out[i] *= factor[i % 4 / 2];
}

// A value's line is B itself, so transposed by ldmatrix. Matrices: keys 0-7 columns 0-7, keys 8-15 columns 0-7, keys
// 0-7 columns 8-15, keys 8-15 columns 8-15. Two neighbouring products' scores, packed in their order, are A.
template <class Element>
__device__ __forceinline__ void accumulate_block(const Scores& score, uint32_t values, Output& out) {
  const int lane = threadIdx.x % 32, swizzle = lane % 8;
  const uint32_t line = values + lane % 16 * kValueLine;
#pragma unroll
  for (int step = 0; step < kBlockKeys / 16; ++step) {
    uint32_t weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights[i] = pack<Element>(score[8 * step + 2 * i], score[8 * step + 2 * i + 1]);
    }
#pragma unroll
    for (int pair = 0; pair < kNope / 16; ++pair) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, line + step * 16 * kValueLine + (((2 * pair + lane / 16) ^ swizzle) << 4));
      ptx::mma_m16n8k16<Element>(product(out + 8 * pair), weights, b[0], b[1]);
      ptx::mma_m16n8k16<Element>(product(out + 8 * pair + 4), weights, b[2], b[3]);
    }
  }
}

// Whether a lane's columns of a row, and those of the row's other lanes, are finite.
__device__ __forceinline__ bool is_finite_row(const Output& out, int e) {
  bool finite = true;
#pragma unroll
  for (int i = 2 * e; i < kNope / 2; i += 4)
    finite = finite && fabsf(out[i]) < INFINITY && fabsf(out[i + 1]) < INFINITY;
  return combine_over_t(finite ? 1.0f : 0.0f, fminf) != 0;
}

}  // namespace mla::generic_prefill
