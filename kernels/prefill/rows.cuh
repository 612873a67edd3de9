// The end of a row: normalised and stored, or merged into the state that is there. A row belongs to the four lanes that
// differ in t, as tensor cores leave it: lane 4 * g + t has columns 8j + 2t and 8j + 2t + 1 of its upper row in
// out[4j], out[4j + 1], and of its lower one in out[4j + 2], out[4j + 3].
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/lanes.cuh"
#include "kernels/decode/softmax.h"
#include "kernels/params.h"

namespace mla::prefill_rows {

using Output = float[kNope / 2];

// A lane's two rows.
struct Rows {
  float reference[2] = {-3.4028235e38f, -3.4028235e38f};  // of the exponents, in base 2; the lowest finite: no key yet
  float sum[2] = {0, 0};                                  // of the weights, over this lane's keys alone
};

// Among the four lanes of a row: lane t's words[j] becomes lane j's words[t].
__device__ __forceinline__ void transpose_words(uint32_t (&words)[4]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (t & bit) != 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & bit) continue;
      const uint32_t received = __shfl_xor_sync(0xFFFFFFFF, upper ? words[j] : words[j + bit], bit);
      (upper ? words[j] : words[j + bit]) = received;
    }
  }
}

// Stores of 16 bytes: a lane has two of eight neighbouring columns, and takes the other six from the row's lanes.
template <class Element>
__device__ __forceinline__ void store_row(Element* target, bool exists, int e, float factor, const Output& out) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int part = 0; part < kNope / 32; ++part) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 4 * (4 * part + j) + 2 * e;
      words[j] = pack<Element>(out[i] * factor, out[i + 1] * factor);
    }
    transpose_words(words);
    if (exists) *reinterpret_cast<uint4*>(target + 8 * (4 * part + t)) = {words[0], words[1], words[2], words[3]};
  }
}

// A side whose lse is -inf, inf or NaN is empty; its out is not read.
__device__ __forceinline__ void merge_row(float* out_row, float* lse_at, float carried, int e, float factor, float lse,
                                          const Output& out) {
  const int t = threadIdx.x % 4;
  const bool has_carry = fabsf(carried) < INFINITY, has_own = fabsf(lse) < INFINITY;
  if (has_carry && !has_own) return;
  float carry_weight = 0, own_weight = has_own ? 1 : 0, merged = has_own ? lse : -INFINITY;
  if (has_carry) {
    const float highest = fmaxf(carried, lse);
    const float carry = expf(carried - highest), own = expf(lse - highest), sum = carry + own;
    carry_weight = carry / sum;
    own_weight = own / sum;
    merged = highest + logf(sum);
  }
  if (t == 0) *lse_at = merged;
#pragma unroll
  for (int j = 0; j < kNope / 8; ++j) {
    auto* target = reinterpret_cast<float2*>(out_row + 8 * j + 2 * t);
    float2 value{};
    if (has_carry) value = *target;
    value.x *= carry_weight;
    value.y *= carry_weight;
    if (has_own) {
      value.x += own_weight * (out[4 * j + 2 * e] * factor);
      value.y += own_weight * (out[4 * j + 2 * e + 1] * factor);
    }
    *target = value;
  }
}

// Row `index` of [T, H]. e: 0 for a lane's upper row, 1 for its lower one. spoiled: a value that it sees is not finite.
// value_scale: what out is multiplied with.
template <class Element>
__device__ __forceinline__ void finish_row(const PrefillParams& p, int64_t index, bool exists, bool spoiled, int e,
                                           const Rows& rows, const Output& out, float value_scale = 1) {
  const float sum = combine_over_t(rows.sum[e], [](float a, float b) { return a + b; });
  const bool empty = sum == 0;  // no key was visible: what has the maximum weighs 1
  float factor = empty ? 0 : value_scale / sum;
  if (!empty && spoiled) factor = NAN;
  const float lse = empty ? -INFINITY : rows.reference[e] * kLn2 + logf(sum);
  if (p.merge) {
    const bool touched = exists && !empty;
    const float carried = touched ? p.lse[index] : 0;
    __syncwarp();  // the row's lanes have read what one of them will overwrite
    if (touched) {
      merge_row(static_cast<float*>(p.out) + index * kNope, p.lse + index, carried, e, factor, lse, out);
    }
  } else {
    store_row(static_cast<Element*>(p.out) + index * kNope, exists, e, factor, out);
    if (exists && threadIdx.x % 4 == 0) p.lse[index] = lse;
  }
}

}  // namespace mla::prefill_rows
