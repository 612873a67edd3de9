// The online softmax of wide tiles. All tokens of a row lie in four lanes of one warp, and a warp of each group has the
// same rows. The references of the exponents move in the order of the blocks: a group weighs its block when it knows
// what the other one's block before left.
//
// Lane 4 * g + t of a group's warp w has rows 16w + g and 16w + g + 8; of the scores tokens 8j + 2t and 8j + 2t + 1, in
// score[4j], score[4j + 1] for the upper row and score[4j + 2], score[4j + 3] for the lower one.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/decode/sm90/wide/shape.h"
#include "kernels/decode/softmax.h"

namespace mla::sm90::wide {

using Scores = float[kBlockTokens / 2];

// The left operand of a block's product with its values, by 16 tokens: neighbouring scores become its pairs.
using Weights = uint32_t[kSteps][4];

// Of the output, this group's columns by products.
using Output = float[kGroupProducts][kProductChunks * kChunkColumns / 2];

// A lane's two rows.
struct Rows {
  float reference[2] = {-INFINITY, -INFINITY};  // of the exponents, in base 2; -inf: no key seen yet
  float sum[2] = {0, 0};                        // of the weights, over this lane's tokens of this group's blocks
};

// 2^(from - to), of references: 1 where there is none yet.
__device__ __forceinline__ float reference_factor(float from, float to) {
  return to == -INFINITY ? 1 : ptx::exp2_approximate(from - to);
}

// -inf where a row does not see a token. `visible`: how many of the block's tokens each row sees.
__device__ __forceinline__ void mask_scores(const int32_t (&visible)[2], uint32_t valid_slices, Scores& score) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kBlockSlices; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if ((valid_slices >> j & 1) == 0 || j * kSliceTokens + 2 * t + e % 2 >= visible[e / 2]) {
        score[4 * j + e] = -INFINITY;
      }
    }
  }
}

// Of this lane's tokens in each of its rows, in base 2.
__device__ __forceinline__ void highest_scores(const Scores& score, float factor, float (&highest)[2]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    highest[e] = -INFINITY;
#pragma unroll
    for (int j = 0; j < kBlockSlices; ++j) {
      highest[e] = fmaxf(highest[e], fmaxf(score[4 * j + 2 * e], score[4 * j + 2 * e + 1]));
    }
    highest[e] *= factor;
  }
}

// The references after this block. True: a row of this warp has a new one. Whether a row's moves depends on that row
// alone.
__device__ __forceinline__ bool next_references(float slack, float (&highest)[2], const Rows& rows, float (&next)[2]) {
  bool outgrown = false;
#pragma unroll
  for (int e = 0; e < 2; ++e) outgrown = outgrown || highest[e] > rows.reference[e] + slack;
  if (!__any_sync(0xFFFFFFFF, outgrown)) return false;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    highest[e] = combine_over_t(highest[e], fmaxf);
    next[e] = highest[e] > rows.reference[e] + slack ? highest[e] : rows.reference[e];
  }
  return true;
}

// What was summed before the references moved, by `factors` of move_references.
__device__ __forceinline__ void rescale_output(const float (&factors)[2], Output& out) {
#pragma unroll
  for (int j = 0; j < kGroupProducts; ++j) {
#pragma unroll
    for (int i = 0; i < kProductChunks * kChunkColumns / 2; ++i) out[j][i] *= factors[i / 2 % 2];
  }
}

// The references become `next`. `factors`: what sums of before are multiplied by; those of the weights are, here.
__device__ __forceinline__ void move_references(const float (&next)[2], Rows& rows, float (&factors)[2]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    factors[e] = reference_factor(rows.reference[e], next[e]);
    rows.sum[e] *= factors[e];
    rows.reference[e] = next[e];
  }
}

// The weights of 16 tokens, step `k` of four.
template <class Element>
__device__ __forceinline__ void weigh(const Scores& score, int k, float factor, const float (&base)[2], Rows& rows,
                                      uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int e = i % 2;
    const float first = ptx::exp2_approximate(fmaf(score[8 * k + 2 * i], factor, -base[e]));
    const float second = ptx::exp2_approximate(fmaf(score[8 * k + 2 * i + 1], factor, -base[e]));
    rows.sum[e] += first + second;
    pairs[i] = pack<Element>(first, second);
  }
}

// `source`: of this thread's first 16 bytes of Control's weights.
constexpr int kStepBytes = kGroupThreads * 16;

__device__ __forceinline__ void read_weights(uint32_t source, Weights& weights) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const uint4 pairs = ptx::load_shared_16(source + k * kStepBytes);
    weights[k][0] = pairs.x;
    weights[k][1] = pairs.y;
    weights[k][2] = pairs.z;
    weights[k][3] = pairs.w;
  }
}

}  // namespace mla::sm90::wide
