// A wave's 32 queries: the online softmax between the two products, in base 2.
//
// A lane has one query, its lower half keys 8i to 8i + 3 of each score tile, its upper half 8i + 4 to 8i + 7.
#pragma once

#include "kernels/decode/softmax.h"
#include "kernels/prefill/gfx9/blocks.h"

namespace mla::gfx9_prefill {

template <int kKeys>
using Scores = F32x16[kKeys / 32];  // of 32 queries

struct Rows {
  float reference = -3.4028235e38f;  // of the exponents; the lowest finite: no key yet
  F32x2 sum = {0, 0};                // of the weights, over this lane's keys alone
  F32x16 out[kValueTiles] = {};      // column 32 * tile + 8 * (r / 4) + 4 * half + r % 4
};

// The reference follows a row's maximum when that has grown by more than `slack`; what was summed before is rescaled.
// A row's bits do not depend on the wave's other rows.
__device__ __forceinline__ void follow(float highest, float slack, Rows& rows) {
  const bool grows = highest > rows.reference + slack;
  if (!any_lane(grows)) return;
  const float reference = grows ? highest : rows.reference;
  const float factor = exp2_approximate(rows.reference - reference);
  rows.reference = reference;
  rows.sum *= factor;
#pragma unroll
  for (auto& out : rows.out) out *= factor;
}

// -inf where a row does not see a key: `visible` of the block's each row sees, but for those whose bit is clear.
template <int kKeys>
__device__ __forceinline__ void mask_scores(int32_t visible, const KeyBits<kKeys>& bits, Scores<kKeys>& scores) {
#pragma unroll
  for (int tile = 0; tile < kKeys / 32; ++tile) {
    const uint32_t seen = (bits.words[tile] & first_bits(visible - 32 * tile)) >> (in_place(lane_id()) / 32 * 4);
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const float score = scores[tile][r];
      scores[tile][r] = seen >> (r / 4 * 8 + r % 4) & 1 ? score : -INFINITY;
    }
  }
}

// What scores are multiplied with to become exponents of 2. Queries take the sign. 0 becomes a number that is as good,
// and leaves a mask's -inf what it is.
__device__ __forceinline__ float exponent_scale(float scale) { return fmaxf(fabsf(scale) * kLog2E, 0x1p-100f); }

// Scores become weights: of a row's highest score 2^shift, up to 2^slack times that until the reference follows.
template <int kKeys>
__device__ __forceinline__ void weigh_scores(float scale, float shift, float slack, F32x16* scores, Rows& rows) {
  float highest = scores[0][0];
#pragma unroll
  for (int i = 1; i < kKeys / 2; ++i) highest = fmaxf(highest, scores[i / 16][i % 16]);
  follow(combine_halves(highest, Largest{}) * scale - shift, slack, rows);
#pragma unroll
  for (int i = 0; i < kKeys / 2; i += 2) {
    F32x16& tile = scores[i / 16];
    F32x2 exponents = {tile[i % 16], tile[i % 16 + 1]};
    exponents = exponents * scale - rows.reference;
    const F32x2 weights = {exp2_approximate(exponents.x), exp2_approximate(exponents.y)};
    rows.sum += weights;
    tile[i % 16] = weights.x;
    tile[i % 16 + 1] = weights.y;
  }
}

}  // namespace mla::gfx9_prefill
