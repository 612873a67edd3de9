// A block's scores and weights in wide tiles. Both are cut into pieces, since a group makes them beside products of the
// output: the first operands while the output's last products run, the weights of eight rows at a time between others.
#pragma once

#include "kernels/decode/sm90/fp8/scores.cuh"
#include "kernels/decode/sm90/fp8/wide/shape.h"

namespace mla::sm90::fp8::wide {

// As copied by the copy engine; `warp`: its tokens are the `warp`-th sixteen of the slot.
struct Keys : KeyLines {
  __device__ __forceinline__ explicit Keys(int warp) : KeyLines(warp, Shape::kRopeOffset) {}

  // The scales of this lane's tokens, and when those of the slot are there.
  __device__ __forceinline__ NoScales scales(uint32_t /*address*/) const { return {}; }
  template <class>
  static __device__ __forceinline__ void await_scales(uint32_t /*base*/, uint32_t /*slot*/, uint32_t /*parity*/) {}
};

// Where this lane stores weights of a warp's tokens, for stmatrix: lanes 0-7 address the rows' first eight tokens,
// lanes 8-15 the next eight.
__device__ __forceinline__ uint32_t weight_line(int warp) {
  const int lane = ptx::thread_index() % 32, line = lane % 8, unit = 2 * warp + lane / 8 % 2;
  return line * kLineBytes + ((unit ^ line) << 4);
}

// Of rows 8j to 8j + 7.
template <class Shape>
__device__ __forceinline__ void store_weights(const Scores<Shape>& score, int j, uint32_t target) {
  ptx::stmatrix_x2_trans(target + j * 8 * kLineBytes, pack<__half>(score[4 * j], score[4 * j + 1]),
                         pack<__half>(score[4 * j + 2], score[4 * j + 3]));
}

// Scores of rows 8j to 8j + 7 become weights, and those of the eight rows before are stored: a store right behind its
// exponentials would wait for them. The last eight rows' are left to be stored.
template <class Shape, class TokenScales>
__device__ __forceinline__ void weigh_rows(Scores<Shape>& score, const TokenScales& scales, const float* references,
                                           int j, uint32_t target, PerRow<Shape>& sum) {
  const float2 reference = row_pair(references, j);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    float& weight = score[4 * j + e];
    weight = ptx::exp2_approximate(weight - (e % 2 == 0 ? reference.x : reference.y));
    sum[2 * j + e % 2] = scales.in_sum(weight, sum[2 * j + e % 2], e / 2);
  }
  if (j > 0) store_weights<Shape>(score, j - 1, target);
}

}  // namespace mla::sm90::fp8::wide
