// The element types of the kernels, as one vocabulary: to and from float, and vectors of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/e4m3.h"

namespace mla {

// Two elements; those that are infinite or NaN become 0.
template <class Element>
__device__ __forceinline__ uint32_t finite(uint32_t pair) {
  constexpr uint32_t kExponent = std::is_same_v<Element, __half> ? 0x7C00 : 0x7F80;
  if ((pair & kExponent) == kExponent) pair &= 0xFFFF0000;
  if ((pair & kExponent << 16) == kExponent << 16) pair &= 0xFFFF;
  return pair;
}

// Two of them, the first in the low byte.
__device__ __forceinline__ uint16_t e4m3fn_pair(float first, float second, bool saturate) {
#if __CUDA_ARCH__ >= 890
  // The instruction clamps what does not fit, and takes NaN to NaN.
  constexpr float kLastRounded = 464;
  if (!saturate && fabsf(first) > kLastRounded) first = NAN;
  if (!saturate && fabsf(second) > kLastRounded) second = NAN;
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return static_cast<uint16_t>(e4m3fn_bits(first, saturate) | e4m3fn_bits(second, saturate) << 8);
#endif
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
// A half's exponent has a bit more and a bias of 15: the shifted bits are 2^-8 of the value, denormal or not.
__device__ __forceinline__ float to_float(E4M3FN x) {
  if ((x.bits & 0x7F) == 0x7F) return NAN;
  return __half2float(__ushort_as_half(static_cast<uint16_t>((x.bits & 0x80) << 8 | (x.bits & 0x7F) << 7))) * 256.0f;
}

__device__ __forceinline__ float to_float(E4M3FNUZ x) {
  if (x.bits == 0x80) return NAN;
  return __half2float(__ushort_as_half(static_cast<uint16_t>((x.bits & 0x80) << 8 | (x.bits & 0x7F) << 7))) * 128.0f;
}

template <class Element>
__device__ __forceinline__ Element from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ E4M3FN from_float<E4M3FN>(float x) {
  return {e4m3fn_bits(x, /*saturate=*/false)};
}
template <>
__device__ __forceinline__ E4M3FNUZ from_float<E4M3FNUZ>(float x) {
  return {e4m3fnuz_bits(x, /*saturate=*/false)};
}

// kCount elements that are read or written in one access.
template <class Element, int kCount>
struct alignas(sizeof(Element) * kCount) Vector {
  Element at[kCount];
};

// Two neighbours in one register, the first in the low half, as the tensor cores take them.
template <class Element>
__device__ __forceinline__ uint32_t pack(float first, float second) {
  const Vector<Element, 2> pair{{from_float<Element>(first), from_float<Element>(second)}};
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

}  // namespace mla
