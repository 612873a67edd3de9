// Matrix products of a wave. D = A B + C in fp32, of 16 x 32 by 32 x 16 elements of 16 bits.
//
// Lane l holds eight elements of A's row l % 16 and of B's column l % 16, those with k = 8 * (l / 16) + e; and of C and
// D the rows 4 * (l / 16) + r of column l % 16. gfx950 has the product as one instruction. gfx942 takes two of half the
// depth, and each has the k that a lane holds: for both operands alike, so that the sum is the same.
#pragma once

#include "kernels/rocm/device.h"

namespace mla {

template <class Element>
using Fragment = Element __attribute__((ext_vector_type(8)));

constexpr int kProductDepth = 32;

__device__ __forceinline__ F32x4 multiply(Fragment<BF16> a, Fragment<BF16> b, F32x4 c) {
#if defined(__gfx950__)
  return __builtin_amdgcn_mfma_f32_16x16x32_bf16(a, b, c, 0, 0, 0);
#else
  using Bits = short __attribute__((ext_vector_type(8)));
  const auto left = bits_as<Bits>(a), right = bits_as<Bits>(b);
  c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(left.lo, right.lo, c, 0, 0, 0);
  return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(left.hi, right.hi, c, 0, 0, 0);
#endif
}

__device__ __forceinline__ F32x4 multiply(Fragment<F16> a, Fragment<F16> b, F32x4 c) {
#if defined(__gfx950__)
  return __builtin_amdgcn_mfma_f32_16x16x32_f16(a, b, c, 0, 0, 0);
#else
  c = __builtin_amdgcn_mfma_f32_16x16x16f16(a.lo, b.lo, c, 0, 0, 0);
  return __builtin_amdgcn_mfma_f32_16x16x16f16(a.hi, b.hi, c, 0, 0, 0);
#endif
}

}  // namespace mla
