// Small floating-point formats and the conversions whose results depend on the architecture or on a mode bit.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "machine.h"

namespace gfx9 {

using Half = _Float16;

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_bf16(float value) {  // to nearest even; a NaN stays one and becomes quiet
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t float_to_half_toward_zero(float value) {
  Half nearest = static_cast<Half>(value);
  uint16_t bits = std::bit_cast<uint16_t>(nearest);
  if (!std::isnan(value) && std::fabs(static_cast<float>(nearest)) > std::fabs(value)) --bits;
  return bits;
}

// Subnormal numbers count as zero, where the guide says that an instruction flushes them.
inline float flush(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value; }

// An 8-bit format. OCP's e4m3fn has one NaN a sign and no infinity, e5m2 has IEEE's; the FNUZ formats of gfx942 have
// neither infinity nor -0, whose place is the NaN's, and a bias larger by one.
struct Float8 {
  int exponent_bits, mantissa_bits, bias;
  bool fnuz;
  bool infinity;

  float decode(uint8_t code) const {
    int exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1);
    int mantissa = code & ((1 << mantissa_bits) - 1);
    float sign = code & 0x80 ? -1.0f : 1.0f;
    bool last = exponent == (1 << exponent_bits) - 1;
    if (fnuz ? code == 0x80 : infinity ? last && mantissa : (code & 0x7f) == 0x7f)
      return std::numeric_limits<float>::quiet_NaN();
    if (infinity && last) return sign * std::numeric_limits<float>::infinity();
    int hidden = exponent ? 1 << mantissa_bits : 0;
    return sign * std::ldexp(static_cast<float>(hidden + mantissa), (exponent ? exponent : 1) - bias - mantissa_bits);
  }

  uint8_t largest() const { return fnuz ? 0x7f : infinity ? 0x7b : 0x7e; }
  uint8_t nan() const { return fnuz ? 0x80 : 0x7f; }

  // To nearest even. What rounds past the largest number, infinity too, becomes it with `clamp` (MODE's FP16_OVFL),
  // else infinity or, in a format without one, NaN: the guides' table "FP16_OVFL rule" of conversions to FP8 and BF8.
  uint8_t encode(float value, bool clamp) const {
    uint8_t sign = std::signbit(value) ? 0x80 : 0;
    if (std::isnan(value)) return fnuz ? nan() : nan() | sign;
    float magnitude = std::fabs(value), limit = decode(largest());
    double rounded = std::numeric_limits<double>::infinity();
    int exponent = 0;
    if (std::isfinite(magnitude)) {
      std::frexp(magnitude, &exponent);                             // magnitude in [2^(exponent-1), 2^exponent)
      exponent = std::max(exponent - 1, 1 - bias) - mantissa_bits;  // of the last place
      rounded = std::ldexp(std::nearbyint(std::ldexp(static_cast<double>(magnitude), -exponent)), exponent);
    }
    if (rounded > limit) {
      if (clamp) return largest() | sign;
      return fnuz ? nan() : (infinity ? 0x7c : nan()) | sign;
    }
    int places = static_cast<int>(std::ldexp(rounded, -exponent));  // up to 2^(mantissa_bits + 1)
    if (places == 0) return fnuz ? 0 : sign;
    int field = exponent + mantissa_bits + bias;  // of a number with the hidden bit
    int code = places < 1 << mantissa_bits ? places : (field << mantissa_bits) + places - (1 << mantissa_bits);
    return static_cast<uint8_t>(code) | sign;
  }
};

inline const Float8& fp8_format(Architecture architecture, bool e5m2) {
  static constexpr Float8 kFnuzE4M3{4, 3, 8, true, false}, kFnuzE5M2{5, 2, 16, true, false};
  static constexpr Float8 kE4M3{4, 3, 7, false, false}, kE5M2{5, 2, 15, false, true};
  if (architecture == Architecture::gfx942) return e5m2 ? kFnuzE5M2 : kFnuzE4M3;
  return e5m2 ? kE5M2 : kE4M3;
}

inline const std::array<float, 256>& fp8_values(Architecture architecture, bool e5m2) {
  static const auto tables = [] {
    std::array<std::array<float, 256>, 4> result;
    for (int i = 0; i < 4; ++i)
      for (int code = 0; code < 256; ++code)
        result[i][code] = fp8_format(static_cast<Architecture>(i / 2), i % 2).decode(static_cast<uint8_t>(code));
    return result;
  }();
  return tables[2 * static_cast<int>(architecture) + e5m2];
}

}  // namespace gfx9
