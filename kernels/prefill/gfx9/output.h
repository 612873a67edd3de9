// The end of a row: normalised and stored, or merged into the state that is there.
#pragma once

#include "kernels/prefill/gfx9/softmax.h"

namespace mla::gfx9_prefill {

// Four neighbouring columns a lane become eight: 16 bytes.
template <class Element>
__device__ __forceinline__ void store_row(Element* row, bool exists, float factor, const Rows& rows) {
#pragma unroll
  for (int i = 0; i < kNope / 16; ++i) {
    const F32x16 out = rows.out[i / 2] * factor;
    const int at = i % 2 * 8;
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = pack<Element>(F32x2{out[at + 2 * j], out[at + 2 * j + 1]});
    swap_halves(words[0], words[2]);
    swap_halves(words[1], words[3]);
    if (exists) {
      *reinterpret_cast<U32x4*>(row + 16 * i + lane_id() / 32 * 8) = U32x4{words[0], words[1], words[2], words[3]};
    }
  }
}

// A side whose lse is -inf, inf or NaN is empty; its out is not read. `lse` is finite or NaN.
__device__ __forceinline__ void merge_row(float* row, float* lse_at, float factor, float lse, const Rows& rows) {
  const float carried = *lse_at;
  const bool has_carry = is_finite(carried), has_own = is_finite(lse);
  if (has_carry && !has_own) return;
  float carry_weight = 0, own_weight = has_own ? 1 : 0, merged = has_own ? lse : -kInfinity;
  if (has_carry) {
    const float highest = __builtin_fmaxf(carried, lse);
    const float carry = exponential(carried - highest), own = exponential(lse - highest), sum = carry + own;
    carry_weight = carry / sum;
    own_weight = own / sum;
    merged = highest + natural_log(sum);
  }
  const int half = lane_id() / 32;
#pragma unroll
  for (int i = 0; i < kNope / 8; ++i) {
    auto* target = reinterpret_cast<F32x4*>(row + 8 * i + 4 * half);
    F32x4 value{};
    if (has_carry) value = *target * carry_weight;
    if (has_own) {
#pragma unroll
      for (int j = 0; j < 4; ++j) value[j] += own_weight * (rows.out[i / 4][i % 4 * 4 + j] * factor);
    }
    *target = value;
  }
  if (half == 0) *lse_at = merged;
}

// Row `index` of [T, H]. spoiled: a value that it sees is not finite.
template <class Element>
__device__ __forceinline__ void finish_row(const PrefillParams& p, int64_t index, bool exists, bool spoiled,
                                           const Rows& rows) {
  const float sum = combine_halves(rows.sum.x + rows.sum.y, Add{});
  const bool empty = sum == 0;  // no key was visible: what had the maximum weighs at least 1
  float factor = empty ? 0 : 1 / sum;
  if (!empty && spoiled) factor = __builtin_nanf("");
  const float lse = empty ? -kInfinity : rows.reference * kLn2 + natural_log(sum);
  if (p.merge) {
    if (exists && !empty) merge_row(static_cast<float*>(p.out) + index * kNope, p.lse + index, factor, lse, rows);
  } else {
    store_row(static_cast<Element*>(p.out) + index * kNope, exists, factor, rows);
    if (exists && lane_id() < 32) p.lse[index] = lse;
  }
}

}  // namespace mla::gfx9_prefill
