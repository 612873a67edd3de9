// Latent values as fp8_ds_mla holds them.
#pragma once

#include "kernels/cache/ds_mla_scale.h"
#include "kernels/group.h"
#include "kernels/params.h"

namespace mla {

// The largest finite magnitude of a group, as bits: they are ordered as the values are.
template <class Element, int kCount>
__device__ __forceinline__ uint32_t largest_finite(const GroupBits<Element, kCount>& group) {
  constexpr int kBits = 8 * sizeof(Element), kPerWord = 4 / sizeof(Element);
  constexpr uint32_t kInfinity = std::is_same_v<Element, float>           ? 0x7F800000
                                 : std::is_same_v<Element, __nv_bfloat16> ? 0x7F80
                                                                          : 0x7C00;
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t magnitude = group.words[i / kPerWord] >> (i % kPerWord * kBits) & (0xFFFFFFFFu >> (33 - kBits));
    if (magnitude < kInfinity) largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// The scale of 128 values, of which neighbouring lanes have a group each.
template <class Element, int kCount>
__device__ __forceinline__ float common_scale(const GroupBits<Element, kCount>& group, bool power_of_two) {
  uint32_t largest = largest_finite(group);
#pragma unroll
  for (int distance = 1; distance < kDsMlaGroup / kCount; distance *= 2) {
    const uint32_t other = __shfl_xor_sync(kWholeWave, largest, distance);
    largest = other > largest ? other : largest;
  }
  const GroupBits<Element, 4 / sizeof(Element)> lone{{largest}};
  return ds_mla_scale(element_at(lone, 0), power_of_two);
}

// value / scale by Markstein's theorem, as Divisor in kernels/group.h; by what a scale and its values are, in fewer
// instructions: no finite quotient is past 448, and a remainder underflows only where the code is 0. The remainder's
// sign is such that a -0 stays one, and what is not finite becomes NaN.
template <class Element, int kCount>
__device__ __forceinline__ GroupBits<E4M3FN, kCount> ds_mla_codes(const GroupBits<Element, kCount>& group,
                                                                  float scale) {
  const float reciprocal = 1.0f / scale;
  float x[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float value = element_at(group, i), quotient = value * reciprocal;
    const float excess = fmaf(quotient, scale, -value);
    x[i] = fmaf(-excess, reciprocal, quotient);
  }
  return from_floats<E4M3FN>(x, /*saturate=*/true);
}

}  // namespace mla
