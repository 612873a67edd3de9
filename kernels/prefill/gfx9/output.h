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

// What the sides of a merge weigh. One whose lse is -inf, inf or NaN is empty; its out is not read.
struct MergeWeights {
  bool keeps;  // the row stays as it is
  bool has_carry, has_own;
  float carry, own;
  float lse;
};

__device__ __forceinline__ MergeWeights merge_weights(float carried, float lse) {
  MergeWeights w{false, isfinite(carried), isfinite(lse), 0, 0, -INFINITY};
  w.keeps = w.has_carry && !w.has_own;
  if (w.has_own) w.own = 1, w.lse = lse;
  if (w.has_carry && w.has_own) {
    const float highest = fmaxf(carried, lse);
    const float carry = expf(carried - highest), own = expf(lse - highest), sum = carry + own;
    w.carry = carry / sum;
    w.own = own / sum;
    w.lse = highest + logf(sum);
  }
  return w;
}

// Four columns of the row.
__device__ __forceinline__ F32x4 merged(const MergeWeights& w, const F32x4* carry, F32x4 own) {
  F32x4 value{};
  if (w.has_carry) value = *carry * w.carry;
  if (w.has_own) value += own * w.own;
  return value;
}

__device__ __forceinline__ F32x4 four_columns(const Rows& rows, int group) {
  const F32x16& out = rows.out[group / 4];
  const int at = group % 4 * 4;
  return {out[at], out[at + 1], out[at + 2], out[at + 3]};
}

__device__ __forceinline__ void merge_row(float* row, float* lse_at, float factor, float lse, const Rows& rows) {
  const MergeWeights weights = merge_weights(*lse_at, lse);
  if (weights.keeps) return;
  const int half = lane_id() / 32;
#pragma unroll
  for (int i = 0; i < kNope / 8; ++i) {
    auto* target = reinterpret_cast<F32x4*>(row + 8 * i + 4 * half);
    *target = merged(weights, target, four_columns(rows, i) * factor);
  }
  if (half == 0) *lse_at = weights.lse;
}

// A row's normalising factor and lse.
struct Ending {
  float factor, lse;
  bool empty;
};

// spoiled: a value that the row sees is not finite. value_scale: what out is multiplied with.
__device__ __forceinline__ Ending end_row(const Rows& rows, bool spoiled, float value_scale) {
  const float sum = combine_halves(rows.sum.x + rows.sum.y, Add{});
  const bool empty = sum == 0;  // no key was visible: what had the maximum weighs at least 1
  Ending ending{empty ? 0 : value_scale / sum, empty ? -INFINITY : rows.reference * kLn2 + logf(sum), empty};
  if (!empty && spoiled) ending.factor = NAN;
  return ending;
}

// Row `index` of [T, H].
template <class Element>
__device__ __forceinline__ void finish_row(const PrefillParams& p, int64_t index, bool exists, const Ending& ending,
                                           const Rows& rows) {
  if (p.merge) {
    if (exists && !ending.empty) {
      merge_row(static_cast<float*>(p.out) + index * kNope, p.lse + index, ending.factor, ending.lse, rows);
    }
  } else {
    store_row(static_cast<Element*>(p.out) + index * kNope, exists, ending.factor, rows);
    if (exists && lane_id() < 32) p.lse[index] = ending.lse;
  }
}

}  // namespace mla::gfx9_prefill
