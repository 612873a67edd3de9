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
  const uint32_t lane = static_cast<uint32_t>(ptx::thread_index()) % 32;
  const uint32_t line = lane % 8, unit = 2 * warp + lane / 8 % 2;
  return line * kLineBytes + ((unit ^ line) << 4);
}

// Of rows 8j to 8j + 7.
template <class Shape>
__device__ __forceinline__ void store_weights(const Scores<Shape>& score, int j, uint32_t target) {
  ptx::stmatrix_x2_trans(target + j * 8 * kLineBytes, pack<__half>(score[4 * j], score[4 * j + 1]),
                         pack<__half>(score[4 * j + 2], score[4 * j + 3]));
}

// A row's reference before its first key. Differences to it are the scores themselves; no other reference is -0, since
// a sum is that only of two such.
constexpr float kUnset = -0.0f;
__device__ __forceinline__ bool is_unset(float reference) {
  return __float_as_uint(reference) == __float_as_uint(kUnset);
}

// Products of tokens that have scales become scores in base 2, lifted, as scale_products() does it.
template <class Shape, class TokenScales>
__device__ __forceinline__ void lift_products(const float* factors, const TokenScales& scales, Scores<Shape>& score) {
  const float exponents[2] = {scales.exponent(0), scales.exponent(1)};
  factors += 2 * (static_cast<uint32_t>(ptx::thread_index()) % 4);  // found anew, since registers are short
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    const float2 factor = *reinterpret_cast<const float2*>(factors + j * 8);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      score[4 * j + e] = fmaf(score[4 * j + e], e % 2 == 0 ? factor.x : factor.y, exponents[e / 2]);
    }
  }
}

// Products, or lifted scores, become scores in base 2 relative to their rows' references.
template <class Shape, bool kLifted>
__device__ __forceinline__ void relate_products(const float* factors, const float* references, Scores<Shape>& score) {
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    const float2 factor = kLifted ? float2{1, 1} : row_pair(factors, j), reference = row_pair(references, j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      score[4 * j + e] =
          fmaf(score[4 * j + e], e % 2 == 0 ? factor.x : factor.y, -(e % 2 == 0 ? reference.x : reference.y));
    }
  }
}

// Whether a score has outgrown its row's reference, or is NaN. As integers, of which the larger of three takes one
// instruction: floats above 0 are in the same order, and all others are below those.
template <class Shape>
__device__ __forceinline__ bool outgrown(const Scores<Shape>& score) {
  const auto bits = [&](int i) { return static_cast<int32_t>(__float_as_uint(score[i])); };
  int32_t largest = max(bits(0), bits(1));
#pragma unroll
  for (int i = 2; i < Shape::kRows / 2; i += 2) largest = max(largest, max(bits(i), bits(i + 1)));
  return largest > static_cast<int32_t>(__float_as_uint(kWeightExponent + kSlack));
}

// What the groups tell each other of a block, in Control::rescaled.
constexpr uint32_t kRescaled = 1;   // the output so far is multiplied by `rescale` first
constexpr uint32_t kSomeUnset = 2;  // a row has not seen a key yet

// Moves the references of rows that have seen no key before, or whose scores have outgrown them, and with them the
// scores. Whether that changes a row depends on the row alone. Returns the block's message. By one group, whose turn it
// is.
template <class Shape>
__device__ __forceinline__ uint32_t move_references(int group, float* rescale, Scores<Shape>& score,
                                                    Control<Shape>& control) {
  const int row = threadIdx.x % kGroupThreads;
  float (&by_warp)[kGroupWarps][Shape::kRows] = control.by_warp[group];
  share_maxima<Shape>(score, by_warp);
  ptx::barrier_sync(kGroupBarrier + group, kGroupThreads);
  bool rescaled = false, unset = false;
  if (row < Shape::kRows) {
    float highest = -INFINITY;
#pragma unroll
    for (int w = 0; w < kGroupWarps; ++w) highest = fmaxf(highest, by_warp[w][row]);
    float& reference = control.reference[row];
    const bool first = is_unset(reference), moves = highest > (first ? -INFINITY : kWeightExponent + kSlack);
    float moved = 0;
    if (moves) {
      const float before = reference;
      reference = before + (highest - kWeightExponent);
      moved = reference - before;  // as rounded
    }
    by_warp[0][row] = moved;  // this row's maxima are read
    rescale[row] = first ? 1 : ptx::exp2_approximate(-moved);
    rescaled = moves && !first;
    unset = first && !moves && row < control.tile.rows;
  }
  rescaled = ptx::barrier_any(kGroupBarrier + group, kGroupThreads, rescaled);
  unset = ptx::barrier_any(kGroupBarrier + group, kGroupThreads, unset);
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    const float2 moved = row_pair(by_warp[0], j);
#pragma unroll
    for (int e = 0; e < 4; ++e) score[4 * j + e] -= e % 2 == 0 ? moved.x : moved.y;
  }
  return (rescaled ? kRescaled : 0) | (unset ? kSomeUnset : 0);
}

// Relative scores of rows 8j to 8j + 7 become weights, and those of the eight rows before are stored: a store right
// behind its exponentials would wait for them. The last eight rows' are left to be stored.
template <class Shape, class TokenScales>
__device__ __forceinline__ void weigh_rows(Scores<Shape>& score, const TokenScales& scales, int j, uint32_t target,
                                           PerRow<Shape>& sum) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    float& weight = score[4 * j + e];
    weight = ptx::exp2_approximate(weight);
    sum[2 * j + e % 2] = scales.in_sum(weight, sum[2 * j + e % 2], e / 2);
  }
  if (j > 0) store_weights<Shape>(score, j - 1, target);
}

}  // namespace mla::sm90::fp8::wide
