// Vectors of kLanes floats on GCC's vector extensions, with loads and stores of every dtype.
//
// A source file compiled for one instruction set defines MLA_ISA (a namespace of its own) and MLA_LANES before the
// first include. Two files compiled with different flags then never share an inline function: the linker keeps one
// copy of such a function, and code of the wider set would run on a machine that lacks it.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/params.h"

#ifndef MLA_ISA
#define MLA_ISA portable
#define MLA_LANES 4
#endif
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define MLA_INLINE inline __attribute__((always_inline))

namespace mla::MLA_ISA {

constexpr int kLanes = MLA_LANES;

typedef float Float __attribute__((vector_size(4 * MLA_LANES)));
typedef int32_t Int __attribute__((vector_size(4 * MLA_LANES)));
typedef uint32_t Unsigned __attribute__((vector_size(4 * MLA_LANES)));
typedef uint16_t Half __attribute__((vector_size(2 * MLA_LANES)));
typedef uint8_t Byte __attribute__((vector_size(MLA_LANES)));

MLA_INLINE Float broadcast(float x) { return Float{} + x; }
MLA_INLINE Int broadcast(int32_t x) { return Int{} + x; }
MLA_INLINE Float as_float(Int x) { return reinterpret_cast<Float>(x); }
MLA_INLINE Int as_int(Float x) { return reinterpret_cast<Int>(x); }

// The first operand wins when the second is NaN.
MLA_INLINE Float max_of(Float a, Float b) {
#if defined(__AVX512F__) && MLA_LANES == 16
  return _mm512_max_ps(b, a);
#else
  return b > a ? b : a;
#endif
}

template <typename Vector>
MLA_INLINE Vector load_bits(const void* source) {
  Vector x;
  memcpy(&x, source, sizeof(x));
  return x;
}

MLA_INLINE Float load(const float* source) { return load_bits<Float>(source); }
MLA_INLINE void store(float* target, Float x) { memcpy(target, &x, sizeof(x)); }

// 2^x for x <= 0, 0 for -inf, NaN for NaN. Relative error below 3e-7; results below 2^-126 are 0.
MLA_INLINE Float exp2_of(Float x) {
  const Float clamped = max_of(x, broadcast(-126.0f));
  const Float to_integer = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Float shifted = clamped + to_integer;
  const Float f = clamped - (shifted - to_integer);  // in [-0.5, 0.5]
  // Taylor's series of 2^f; the first term left out is below 1.2e-7 relative to 2^-0.5.
  Float p = broadcast(1.5403530e-4f);
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  // The integer's low bits, added to the exponent; a result of at least 2^-126 keeps one.
  const Float power = as_float(as_int(p) + (as_int(shifted) << 23));
  return x < broadcast(-126.0f) ? Float{} : power;
}

// ---- float <- dtype, exact. No arithmetic on denormals, which a thread of XLA's flushes to zero.

MLA_INLINE Float half_to_float(Half half) {
#if defined(__F16C__) && MLA_LANES == 8
  return _mm256_cvtph_ps((__m128i)half);
#elif defined(__F16C__) && MLA_LANES == 16
  return _mm512_cvtph_ps((__m256i)half);
#else
  const Int bits = __builtin_convertvector(half, Int);
  const Int magnitude = (bits & 0x7fff) << 13;
  const Int smallest = broadcast(113 << 23);  // 2^-14
  const Int normal = magnitude + (112 << 23);
  const Int subnormal = as_int(as_float(magnitude + smallest) - as_float(smallest));
  const Int special = magnitude | 0x7f800000;
  Int result = magnitude < 0x00800000 ? subnormal : normal;
  result = magnitude >= 0x0f800000 ? special : result;
  return as_float(result | (bits & 0x8000) << 16);
#endif
}

// kBias 7 is e4m3fn, 8 is e4m3fnuz.
template <int kBias>
MLA_INLINE Float e4m3_to_float(Byte codes) {
  const Int bits = __builtin_convertvector(codes, Int);
  const Int magnitude = bits & 0x7f;
  const Int normal = (magnitude << 20) + ((127 - kBias) << 23);
  const Float subnormal = __builtin_convertvector(magnitude, Float) * (kBias == 7 ? 0x1p-9f : 0x1p-10f);
  const Int result = (magnitude < 8 ? as_int(subnormal) : normal) | (bits & 0x80) << 24;
  const Int is_nan = kBias == 7 ? magnitude == 0x7f : bits == 0x80;
  return as_float(is_nan ? broadcast(0x7fc00000) : result);
}

// ---- dtype <- float, to nearest even.

MLA_INLINE Half float_to_bfloat(Float x) {
  const Int bits = as_int(x);
  const auto pattern = reinterpret_cast<Unsigned>(bits);  // a NaN's may overflow
  const auto rounded = reinterpret_cast<Int>((pattern + 0x7fff + ((pattern >> 16) & 1)) >> 16);
  const Int quiet = (bits >> 16) | 0x40;
  return __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded, Half);
}

MLA_INLINE Half float_to_half(Float x) {
  const Int bits = as_int(x);
  const Int magnitude = bits & 0x7fffffff;
  const auto pattern = reinterpret_cast<Unsigned>(magnitude);  // a NaN's may overflow
  const Int normal = reinterpret_cast<Int>(pattern + 0xfff + ((pattern >> 13) & 1) - (112 << 23)) >> 13;
  // Adding 0.5 leaves the multiple of 2^-24 in the low bits.
  const Int subnormal = as_int(as_float(magnitude) + 0.5f) - as_int(broadcast(0.5f));
  Int result = magnitude < (113 << 23) ? subnormal : normal;
  result = result > 0x7c00 || magnitude >= 0x7f800000 ? broadcast(0x7c00) : result;
  result = magnitude > 0x7f800000 ? broadcast(0x7e00) : result;
  return __builtin_convertvector(result | ((bits >> 16) & 0x8000), Half);
}

// What does not fit is NaN, infinities too: 0x7f with either sign in e4m3fn, 0x80 in e4m3fnuz.
template <int kBias>
MLA_INLINE Byte float_to_e4m3(Float x) {
  constexpr int kLargest = kBias == 7 ? 0x7e : 0x7f;
  const Int bits = as_int(x);
  const Int infinity = broadcast(0x7f800000);
  const Int magnitude = (bits & 0x7fffffff) > infinity ? infinity : bits & 0x7fffffff;  // NaN goes where infinity goes
  const Int normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - ((127 - kBias) << 3);
  // Adding 2^23 units leaves the multiple of the unit (2^-9 or 2^-10) in the low bits.
  const Float units = broadcast(kBias == 7 ? 0x1p14f : 0x1p13f);
  const Int subnormal = as_int(as_float(magnitude) + units) - as_int(units);
  const Int code = magnitude < ((128 - kBias) << 23) ? subnormal : normal;
  const Int sign = (bits >> 24) & 0x80;
  Int result;
  if (kBias == 7) {
    result = (code > kLargest ? broadcast(0x7f) : code) | sign;
  } else {
    result = code > kLargest ? broadcast(0x80) : code == 0 ? Int{} : code | sign;  // there is no -0: 0x80 is NaN
  }
  return __builtin_convertvector(result, Byte);
}

// ---- By dtype.

template <DType kType>
struct TypeTag {
  static constexpr DType kValue = kType;
};

// Calls f with the tag of a dtype known only at run time.
template <typename F>
MLA_INLINE void with_dtype(DType type, const F& f) {
  switch (type) {
    case DType::kF32: return f(TypeTag<DType::kF32>{});
    case DType::kBF16: return f(TypeTag<DType::kBF16>{});
    case DType::kF16: return f(TypeTag<DType::kF16>{});
    case DType::kE4M3FN: return f(TypeTag<DType::kE4M3FN>{});
    case DType::kE4M3FNUZ: return f(TypeTag<DType::kE4M3FNUZ>{});
  }
}

constexpr int64_t bytes_of(DType type) {
  return type == DType::kF32 ? 4 : type == DType::kBF16 || type == DType::kF16 ? 2 : 1;
}

template <DType kType>
MLA_INLINE Float load_as_float(const void* source) {
  if constexpr (kType == DType::kF32) return load_bits<Float>(source);
  if constexpr (kType == DType::kBF16) return as_float(__builtin_convertvector(load_bits<Half>(source), Int) << 16);
  if constexpr (kType == DType::kF16) return half_to_float(load_bits<Half>(source));
  if constexpr (kType == DType::kE4M3FN) return e4m3_to_float<7>(load_bits<Byte>(source));
  if constexpr (kType == DType::kE4M3FNUZ) return e4m3_to_float<8>(load_bits<Byte>(source));
}

template <DType kType>
MLA_INLINE void store_from_float(void* target, Float x) {
  if constexpr (kType == DType::kF32) {
    memcpy(target, &x, sizeof(x));
  } else if constexpr (kType == DType::kBF16 || kType == DType::kF16) {
    const Half narrow = kType == DType::kBF16 ? float_to_bfloat(x) : float_to_half(x);
    memcpy(target, &narrow, sizeof(narrow));
  } else {
    const Byte narrow = kType == DType::kE4M3FN ? float_to_e4m3<7>(x) : float_to_e4m3<8>(x);
    memcpy(target, &narrow, sizeof(narrow));
  }
}

}  // namespace mla::MLA_ISA
