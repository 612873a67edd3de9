// O^T += V^T P^T for the 128 columns of a wave, and the output's way to memory.
#pragma once

#include "kernels/decode/gfx9/shape.h"

namespace mla::gfx9 {

template <class Shape>
using Output = F32x4[Shape::kOutRowFragments][Shape::kOutFragments];

// Which of the wave's 128 columns a lane has in product f: `row` of 16.
//
// gfx950 reads values transposed. Sixteen lanes read four tokens, eight bytes each; these columns put them on different
// banks. gfx942 reads eight neighbouring columns of a token in a lane, and takes tokens together in registers.
#if defined(__gfx950__)
template <class Element, class Shape>
__device__ __forceinline__ void load_values(const Block& block, int wave, int lane,
                                            Fragment<Element> (&values)[Shape::kOutFragments]) {
  const int token = lane / 16 * 8 + lane % 16 / 4, columns = lane % 4 / 2 * 32 + lane % 2 * 4;
  const unsigned char* source = block.latent[token] + (wave * Shape::kOutColumns + columns) * 2;
#pragma unroll
  for (int f = 0; f < Shape::kOutFragments; ++f) {
    const LdsBytes place = lds_address(source + (f / 4 * 64 + f % 4 * 8) * 2);
    const U32x2 low = lds_read_transposed(place), high = lds_read_transposed(place + 4 * Block::kLatentStride);
    values[f] = bits_as<Fragment<Element>>(U32x4{low.x, low.y, high.x, high.y});
  }
}
#else
template <class Element, class Shape>
__device__ __forceinline__ void load_values(const Block& block, int wave, int lane,
                                            Fragment<Element> (&values)[Shape::kOutFragments]) {
  constexpr uint32_t kLowHalves = 0x05040100, kHighHalves = 0x07060302;
  const unsigned char* source = block.latent[lane / 16 * 8] + (wave * Shape::kOutColumns + lane % 16 * 8) * 2;
  U32x4 tokens[8];
#pragma unroll
  for (int t = 0; t < 8; ++t) tokens[t] = *reinterpret_cast<const U32x4*>(source + t * Block::kLatentStride);
#pragma unroll
  for (int f = 0; f < Shape::kOutFragments; ++f) {
    U32x4 column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      column[i] =
          __builtin_amdgcn_perm(tokens[2 * i + 1][f / 2], tokens[2 * i][f / 2], f % 2 == 0 ? kLowHalves : kHighHalves);
    }
    values[f] = bits_as<Fragment<Element>>(column);
  }
}
#endif

// Eight tokens' weights, times the scales of their values: a wave's 128 columns have one scale a token.
template <class Element>
__device__ __forceinline__ Fragment<Element> scale_weights(Fragment<Element> weights, const float* scales) {
  const auto* factors = reinterpret_cast<const F32x4*>(scales);
  const auto numbers = __builtin_convertvector(weights, float __attribute__((ext_vector_type(8))));
  const U32x2 low = pack_weights<Element>(numbers.lo * factors[0]);
  const U32x2 high = pack_weights<Element>(numbers.hi * factors[1]);
  return bits_as<Fragment<Element>>(U32x4{low.x, low.y, high.x, high.y});
}

template <class Element, class Shape, class Shared>
__device__ __forceinline__ void accumulate_block(const Shared& shared, const Block& block, int wave, int lane,
                                                 Output<Shape>& out) {
  Fragment<Element> values[Shape::kOutFragments];
  load_values<Element, Shape>(block, wave, lane, values);
  U32x4 all_weights[Shape::kOutRowFragments];
#pragma unroll
  for (int m = 0; m < Shape::kOutRowFragments; ++m) {
    const auto* row = &shared.weights[m * 16 + lane % 16][lane / 16 * 8];
    all_weights[m] = *reinterpret_cast<const U32x4*>(row);
  }
  wait_for_lds();
#pragma unroll
  for (int m = 0; m < Shape::kOutRowFragments; ++m) {
    auto weights = bits_as<Fragment<Element>>(static_cast<U32x4>(all_weights[m]));
    if constexpr (Shared::kScaled) weights = scale_weights(weights, &shared.key_scales[wave][lane / 16 * 8]);
#pragma unroll
    for (int f = 0; f < Shape::kOutFragments; ++f) out[m][f] = multiply(values[f], weights, out[m][f]);
  }
}

// Where some row's reference has moved.
template <class Shape, class Shared>
__device__ __forceinline__ void rescale_output(const Shared& shared, int lane, Output<Shape>& out) {
  using Factors = float __attribute__((ext_vector_type(Shape::kOutRowFragments)));
  const Factors factors = *reinterpret_cast<const Factors*>(shared.rescale[0][lane % 16]);
  // All are in [0, 1], where bits are in the order of values; of floats the compiler would first make NaNs quiet.
  uint32_t least = bits_as<uint32_t>(1.0f);
#pragma unroll
  for (int m = 0; m < Shape::kOutRowFragments; ++m) {
    const auto bits = bits_as<uint32_t>(static_cast<float>(factors[m]));
    least = bits < least ? bits : least;
  }
  if (!any_lane(least < bits_as<uint32_t>(1.0f))) return;
#pragma unroll
  for (int m = 0; m < Shape::kOutRowFragments; ++m) {
#pragma unroll
    for (int f = 0; f < Shape::kOutFragments; ++f) out[m][f] *= factors[m];
  }
}

// Eight neighbouring columns, of 128, of the row that a lane has in 16.
struct Columns {
  float at[8];
  int first;
};

// The i-th of a lane's four in the row.
__device__ __forceinline__ Columns columns_of(const F32x4 (&out)[8], int i, int lane) {
  Columns columns;
#if defined(__gfx950__)
  // Four of them are this lane's, four those of the lane 16 further. Of two products each of the two takes one.
  const bool second = lane / 16 % 2 == 1;
  const F32x4 own = second ? out[2 * i + 1] : out[2 * i], others = second ? out[2 * i] : out[2 * i + 1];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float from_other = shuffle_xor(static_cast<float>(others[r]), 16);
    columns.at[r] = second ? from_other : own[r];
    columns.at[r + 4] = second ? own[r] : from_other;
  }
  columns.first = i / 2 * 64 + lane / 32 * 32 + (2 * i % 4 + second) * 8;
#else
#pragma unroll
  for (int f = 0; f < 8; ++f) columns.at[f] = out[f][i];
  columns.first = lane / 16 * 32 + i * 8;
#endif
  return columns;
}

template <class Target>
__device__ __forceinline__ void store_columns(Target* target, const Columns& columns, float factor) {
  float __attribute__((ext_vector_type(8))) values;
#pragma unroll
  for (int c = 0; c < 8; ++c) values[c] = columns.at[c] * factor;
  auto* words = reinterpret_cast<U32x4*>(target + columns.first);
  if constexpr (sizeof(Target) == 4) {
    words[0] = bits_as<U32x4>(static_cast<F32x4>(values.lo));
    words[1] = bits_as<U32x4>(static_cast<F32x4>(values.hi));
  } else {
    words[0] = bits_as<U32x4>(__builtin_convertvector(values, Fragment<Target>));
  }
}

}  // namespace mla::gfx9
