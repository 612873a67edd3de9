// Products of 32x32 results for both architectures, in one form: eight 16-bit elements a lane of either operand.
//
// l: lane, half: l / 32. A has row l % 32, B column l % 32, both the same eight of 16 positions of the contraction. The
// order of positions is free as long as A and B agree; with keys as positions it is 4 * half + 0..3, then 8 more. The
// result has column l % 32, and in element r row 8 * (r / 4) + 4 * half + r % 4: so four of its elements after four
// more are an operand of the next product as they are.
#pragma once

#include "kernels/rocm/device.h"

namespace mla::gfx9_prefill {

using BF16x8 = __bf16 __attribute__((ext_vector_type(8)));
using F16x8 = _Float16 __attribute__((ext_vector_type(8)));
using F16x4 = _Float16 __attribute__((ext_vector_type(4)));
using F16x2 = _Float16 __attribute__((ext_vector_type(2)));
using BF16x2 = __bf16 __attribute__((ext_vector_type(2)));
using S16x4 = short __attribute__((ext_vector_type(4)));

using Fragment = U32x4;

// A B + sums. gfx942 takes the contraction in two halves.
template <class Element>
__device__ __forceinline__ F32x16 multiply(Fragment a, Fragment b, F32x16 sums) {
#if defined(__gfx950__)
  if constexpr (std::is_same_v<Element, BF16>) {
    return __builtin_amdgcn_mfma_f32_32x32x16_bf16(bits_as<BF16x8>(a), bits_as<BF16x8>(b), sums, 0, 0, 0);
  } else {
    return __builtin_amdgcn_mfma_f32_32x32x16_f16(bits_as<F16x8>(a), bits_as<F16x8>(b), sums, 0, 0, 0);
  }
#else
  const U32x2 a_halves[2] = {{a.x, a.y}, {a.z, a.w}}, b_halves[2] = {{b.x, b.y}, {b.z, b.w}};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (std::is_same_v<Element, BF16>) {
      sums = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(bits_as<S16x4>(a_halves[i]), bits_as<S16x4>(b_halves[i]), sums, 0,
                                                      0, 0);
    } else {
      sums =
          __builtin_amdgcn_mfma_f32_32x32x8f16(bits_as<F16x4>(a_halves[i]), bits_as<F16x4>(b_halves[i]), sums, 0, 0, 0);
    }
  }
  return sums;
#endif
}

// Two rounded values in a register. Where there is no instruction for bf16, ties go away from zero.
template <class Element>
__device__ __forceinline__ uint32_t pack(F32x2 values) {
  if constexpr (std::is_same_v<Element, F16>) return bits_as<uint32_t>(__builtin_convertvector(values, F16x2));
  if constexpr (kGfx950) return bits_as<uint32_t>(__builtin_convertvector(values, BF16x2));
  const U32x2 rounded = bits_as<U32x2>(values) + 0x8000;
  const uint32_t low = rounded.x, high = rounded.y;
  return __builtin_amdgcn_perm(high, low, 0x07060302);
}

// The halves of a wave exchange: lanes 0 to 31 get {low, the other half's low}, the others {the other half's high,
// high}.
__device__ __forceinline__ void swap_halves(uint32_t& low, uint32_t& high) {
#if defined(__gfx950__)
  const auto swapped = __builtin_amdgcn_permlane32_swap(low, high, false, false);
  low = swapped[0];
  high = swapped[1];
#else
  const bool upper = lane_id() >= 32;
  const uint32_t received = shuffle_xor(upper ? low : high, 32);
  (upper ? low : high) = received;
#endif
}

// Of a lane and of the one in the other half.
template <class Combine>
__device__ __forceinline__ float combine_halves(float value, Combine combine) {
#if defined(__gfx950__)
  uint32_t low = bits_as<uint32_t>(value), high = low;
  swap_halves(low, high);
  return combine(bits_as<float>(low), bits_as<float>(high));
#else
  return combine(value, shuffle_xor(value, 32));
#endif
}

}  // namespace mla::gfx9_prefill
