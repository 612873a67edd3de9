// Elements of any dtype as bytes on the host: their values, and casts by their rule.
#pragma once

#include "tests/native/cuda_helper_groups.h"

namespace mla::test {

using Bytes = std::vector<uint8_t>;

inline double e4m3fnuz_value(int bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  return exponent ? std::ldexp(8 + mantissa, exponent - 11) : std::ldexp(mantissa, -10);
}

// As e4m3fn_rule: 256 stands behind the last code. What rounds to 0 has no sign.
inline uint8_t e4m3fnuz_rule(float x, bool saturate) {
  if (std::isnan(x)) return 0x80;
  double magnitude = std::fabs(double{x});
  if (saturate) magnitude = std::min(magnitude, 240.0);
  if (magnitude >= 256) return 0x80;
  int best = 0;
  double best_distance = INFINITY;
  for (int code = 0; code <= 0x80; ++code) {
    const double distance = std::fabs((code == 0x80 ? 256 : e4m3fnuz_value(code)) - magnitude);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) {
      best = code;
      best_distance = distance;
    }
  }
  return static_cast<uint8_t>(best == 0 || best == 0x80 || !std::signbit(x) ? best : best | 0x80);
}

inline float value_at(DType dtype, const uint8_t* element) {
  float f32;
  __nv_bfloat16 bf16;
  __half f16;
  const int code = *element & 0x7F;
  switch (dtype) {
    case DType::kF32: std::memcpy(&f32, element, 4); return f32;
    case DType::kBF16: std::memcpy(&bf16, element, 2); return host_float(bf16);
    case DType::kF16: std::memcpy(&f16, element, 2); return host_float(f16);
    case DType::kE4M3FN:
      return code == 0x7F ? NAN : static_cast<float>(std::copysign(e4m3fn_value(code), *element & 0x80 ? -1 : 1));
    case DType::kE4M3FNUZ:
      return *element == 0x80 ? NAN : static_cast<float>(std::copysign(e4m3fnuz_value(code), *element & 0x80 ? -1 : 1));
  }
  return NAN;
}

inline void set_value(DType dtype, uint8_t* element, float x, bool saturate = false) {
  const auto bf16 = host_element<__nv_bfloat16>(x);
  const auto f16 = host_element<__half>(x);
  switch (dtype) {
    case DType::kF32: std::memcpy(element, &x, 4); break;
    case DType::kBF16: std::memcpy(element, &bf16, 2); break;
    case DType::kF16: std::memcpy(element, &f16, 2); break;
    case DType::kE4M3FN: *element = e4m3fn_rule(x, saturate); break;
    case DType::kE4M3FNUZ: *element = e4m3fnuz_rule(x, saturate); break;
  }
}

// What a kernel that converts has to write: bits as they are where nothing changes them.
inline void convert_value(DType target, uint8_t* to, DType source, const uint8_t* from, float multiply, float divide,
                          bool saturate = false) {
  if (target == source && multiply == 1 && divide == 1) {
    std::memcpy(to, from, size_of(source));
  } else {
    set_value(target, to, value_at(source, from) * multiply / divide, saturate);
  }
}

// NaN has many bits.
inline bool same_element(DType dtype, const uint8_t* a, const uint8_t* b) {
  return std::memcmp(a, b, size_of(dtype)) == 0 || (std::isnan(value_at(dtype, a)) && std::isnan(value_at(dtype, b)));
}

// -1, or the first element that differs.
inline int64_t first_difference(DType dtype, const Bytes& actual, const Bytes& expected) {
  const int64_t size = size_of(dtype);
  for (int64_t at = 0; at < static_cast<int64_t>(expected.size()); at += size) {
    if (!same_element(dtype, actual.data() + at, expected.data() + at)) return at / size;
  }
  return -1;
}

inline bool is_poison(const Bytes& bytes, size_t from) {
  return std::all_of(bytes.begin() + static_cast<int64_t>(from), bytes.end(),
                     [](uint8_t byte) { return byte == 0xFF; });
}

inline Bytes noise_of(DType dtype, int64_t count, uint64_t seed) {
  Bytes bytes(count * size_of(dtype));
  for (int64_t i = 0; i < count; ++i) set_value(dtype, bytes.data() + i * size_of(dtype), noise(seed, i));
  return bytes;
}

}  // namespace mla::test
