// Online softmax over a block's tokens: the weights P^T for the output warps, of scores S^T.
//
// Tokens are the rows of S^T, (query, head) rows its columns. Lane 4 * g + t of a group's warp w has the scores of
// tokens 16w + g and 16w + g + 8 with the rows 8j + 2t and 8j + 2t + 1, in score[4j .. 4j+3] as wgmma.cuh says; of what
// it keeps a row, [2j] and [2j + 1] belong to those two.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/decode/sm90/fp8/instructions.cuh"
#include "kernels/decode/sm90/fp8/shape.h"
#include "kernels/decode/softmax.h"

namespace mla::sm90::fp8 {

template <class Shape>
using PerRow = float[Shape::kRows / 4];

// Sums of an item's weights. Where registers are dear, those of a row are with one lane of a warp, which has the rows 2
// * lane and 2 * lane + 1.
template <class Shape>
using WeightSums = float[Shape::kTight ? 2 : Shape::kRows / 4];

// Weights are scaled by it, so that fp16 holds them down to 2^-31 of the largest; with the softmax's slack they stay
// below 2^15.
constexpr float kWeightExponent = 7;

// What `values` has for this lane's rows 8j + 2t and 8j + 2t + 1.
__device__ __forceinline__ float2 row_pair(const float* values, int j) {
  return *reinterpret_cast<const float2*>(values + j * 8 + 2 * (threadIdx.x % 4));
}

template <class Shape>
__device__ __forceinline__ void scale_products(const float* factors, Scores<Shape>& score) {
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    const float2 factor = row_pair(factors, j);
#pragma unroll
    for (int e = 0; e < 4; ++e) score[4 * j + e] *= e % 2 == 0 ? factor.x : factor.y;
  }
}

// -inf where a row does not see a token. `first_token`: of the block.
template <class Shape>
__device__ __forceinline__ void mask_scores(const int32_t* visible_end, int32_t first_token, uint32_t valid_groups,
                                            int warp, Scores<Shape>& score) {
  const int lane = ptx::thread_index<Shape::kTight>() % 32, g = lane / 4, t = lane % 4;
  const int32_t token = first_token + warp * 16 + g;
  const bool upper_valid = (valid_groups >> (2 * warp) & 1) != 0, lower_valid = (valid_groups >> (2 * warp) & 2) != 0;
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int32_t end = visible_end[j * 8 + 2 * t + e];
      if (!upper_valid || token >= end) score[4 * j + e] = -INFINITY;
      if (!lower_valid || token + 8 >= end) score[4 * j + 2 + e] = -INFINITY;
    }
  }
}

// Whether a score has outgrown its row's reference.
template <class Shape>
__device__ __forceinline__ bool outgrown(const Scores<Shape>& score, const float* references) {
  float largest = -INFINITY;
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    const float2 reference = row_pair(references, j);
    largest = fmaxf(largest, fmaxf(score[4 * j], score[4 * j + 2]) - reference.x);
    largest = fmaxf(largest, fmaxf(score[4 * j + 1], score[4 * j + 3]) - reference.y);
  }
  return largest > kWeightExponent + kSlack;
}

template <class Shape>
__device__ __forceinline__ void rescale_sums(const float* rescale, WeightSums<Shape>& sum) {
  if constexpr (Shape::kTight) {
    const int row = ptx::thread_index<Shape::kTight>() % 32 * 2;
    if (row >= Shape::kRows) return;
    const float2 factor = *reinterpret_cast<const float2*>(rescale + row);
    sum[0] *= factor.x;
    sum[1] *= factor.y;
  } else {
#pragma unroll
    for (int j = 0; j < Shape::kRowGroups; ++j) {
      const float2 factor = row_pair(rescale, j);
      sum[2 * j] *= factor.x;
      sum[2 * j + 1] *= factor.y;
    }
  }
}

// Moves the references of rows whose scores have outgrown them; by how much that shrinks what was summed so far is then
// in `rescale`. One group, whose turn it is.
template <class Shape>
__device__ __forceinline__ void move_references(const Scores<Shape>& score, int group, float* rescale,
                                                Control<Shape>& control) {
  const int thread = ptx::thread_index<Shape::kTight>(), lane = thread % 32, g = lane / 4, t = lane % 4,
            row = thread % kGroupThreads;
  float (&by_warp)[kGroupWarps][Shape::kRows] = control.by_warp[group];
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    float2 highest;
    highest.x = combine_over_g(fmaxf(score[4 * j], score[4 * j + 2]), fmaxf);
    highest.y = combine_over_g(fmaxf(score[4 * j + 1], score[4 * j + 3]), fmaxf);
    if (g == 0) *reinterpret_cast<float2*>(&by_warp[row / 32][j * 8 + 2 * t]) = highest;
  }
  ptx::barrier_sync(kGroupBarrier + group, kGroupThreads);
  if (row < Shape::kRows) {
    float highest = -INFINITY;
#pragma unroll
    for (int w = 0; w < kGroupWarps; ++w) highest = fmaxf(highest, by_warp[w][row]);
    float& reference = control.reference[row];
    float factor = 1;
    if (highest - reference > kWeightExponent + kSlack) {
      factor = ptx::exp2_approximate(reference - (highest - kWeightExponent));
      reference = highest - kWeightExponent;
    }
    rescale[row] = factor;
  }
  ptx::barrier_sync(kGroupBarrier + group, kGroupThreads);
}

// P^T of the block, a line of 64 tokens for each row, as the right operand of the output's product.
template <class Shape>
__device__ __forceinline__ void write_weights(const Scores<Shape>& score, const float* references, int warp,
                                              uint32_t weights, PerRow<Shape>& sum) {
  const int lane = ptx::thread_index<Shape::kTight>() % 32;
  // stmatrix: lanes 0-7 address the rows' first eight tokens of this warp, lanes 8-15 the next eight.
  const int line = lane % 8, unit = 2 * warp + lane / 8 % 2;
  const uint32_t target = weights + line * kLineBytes + ((unit ^ line) << 4);
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    const float2 reference = row_pair(references, j);
    float weight[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      weight[e] = ptx::exp2_approximate(score[4 * j + e] - (e % 2 == 0 ? reference.x : reference.y));
      sum[2 * j + e % 2] += weight[e];
    }
    ptx::stmatrix_x2_trans(target + j * 8 * kLineBytes, pack<__half>(weight[0], weight[1]),
                           pack<__half>(weight[2], weight[3]));
  }
}

// Adds what the lanes have of a block to the sums of the lanes that keep them: each exchange with a lane of another g
// halves the rows that are left.
template <class Shape>
__device__ __forceinline__ void gather_sums(const PerRow<Shape>& added, WeightSums<Shape>& sum) {
  const int lane = ptx::thread_index<Shape::kTight>() % 32;
  float values[16] = {};
#pragma unroll
  for (int i = 0; i < Shape::kRows / 4; ++i) values[i] = added[i];
#pragma unroll
  for (int step = 0; step < 3; ++step) {
    const int half = 8 >> step;
    const bool upper = (lane & 2 * half) != 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= half) continue;
      const float other = __shfl_xor_sync(0xFFFFFFFF, upper ? values[i] : values[half + i], 2 * half);
      values[i] = (upper ? values[half + i] : values[i]) + other;
    }
  }
  sum[0] += values[0];
  sum[1] += values[1];
}

}  // namespace mla::sm90::fp8
