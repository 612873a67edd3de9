// A few neighbouring elements at a time, for CUDA and HIP: how they change from one type to another.
#pragma once

#include <type_traits>

#if defined(__HIP__)
#include "kernels/rocm/group.h"
#else
#include "kernels/cuda/group.cuh"
#endif
#include "kernels/gpu.h"

namespace mla {

// Division by a number that many values share, rounded as the instruction sequence of `/` rounds it, in fewer
// instructions: by Markstein's theorem (IBM J. Res. Dev. 34, 1990) a quotient from the rounded reciprocal, corrected
// once by its exact remainder, is the rounded quotient. The divisor's exponent is taken out first, lest the remainder
// underflow; a divisor that is not normal has its reciprocal's product.
struct Divisor {
  float power = 1, divisor = 1, reciprocal = 1;  // power * the divisor asked for is in [1, 2)

  Divisor() = default;
  __device__ __forceinline__ explicit Divisor(float value) {
    const uint32_t exponent = __float_as_uint(value) >> 23 & 0xFF;
    const bool normal = exponent != 0 && exponent != 0xFF;
    power = !normal ? 1.0f : exponent < 254 ? __uint_as_float((254 - exponent) << 23) : 0x1p-127f;
    divisor = value * power;
    reciprocal = 1.0f / divisor;
  }

  __device__ __forceinline__ bool is_one() const { return divisor == 1 && power == 1; }

  __device__ __forceinline__ float divide(float x) const {
    const float dividend = x * power, quotient = dividend * reciprocal;
    const float remainder = fmaf(-quotient, divisor, dividend);
    const bool inexact = fabsf(remainder) > 0 && fabsf(remainder) < INFINITY;  // else it may be an infinity, or a -0
    return inexact ? fmaf(remainder, reciprocal, quotient) : quotient;
  }
};

// How values change on their way: value * multiply / divide, in fp32, rounded once; fp8 targets clamp if `saturate`.
struct Conversion {
  float multiply = 1;
  Divisor divide = {};
  bool saturate = false;
};

// What nothing changes keeps its bits.
template <class Target, class Source, int kCount>
__device__ __forceinline__ GroupBits<Target, kCount> convert_group(const GroupBits<Source, kCount>& bits,
                                                                   Conversion conversion) {
  if constexpr (std::is_same_v<Target, Source>) {
    if (conversion.multiply == 1 && conversion.divide.is_one()) return bits;
  }
  float x[kCount];
  to_floats(bits, conversion.multiply, x);
  if (!conversion.divide.is_one()) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = conversion.divide.divide(x[i]);
  }
  return from_floats<Target>(x, conversion.saturate);
}

}  // namespace mla
