// The 8-bit element types, and the casts to them by integer arithmetic: the same bits on every device and on the host.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/host_device.h"

namespace mla {

// OCP e4m3: four bits of exponent with bias 7, three of mantissa, no infinity, NaN 0x7F and 0xFF.
struct E4M3FN {
  uint8_t bits;
};

// gfx942's e4m3: bias 8, no infinity, no -0, whose code 0x80 is NaN.
struct E4M3FNUZ {
  uint8_t bits;
};

// OCP e4m3 by round to nearest even, as XLA's astype: past the largest finite value NaN, or that value if `saturate`.
MLA_HOST_DEVICE MLA_FORCE_INLINE uint8_t e4m3fn_bits(float x, bool saturate) {
  constexpr uint32_t kInfinity = 0x7F800000;
  constexpr uint32_t kLargest = 0x43E00000;         // 448
  constexpr uint32_t kLastRounded = 0x43E80000;     // 464, half way to 480, rounds to the even 448
  constexpr uint32_t kSmallestNormal = 0x3C800000;  // 2^-6
  constexpr uint8_t kNaN = 0x7F;
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > kInfinity) return kNaN;
  if (saturate && magnitude > kLargest) magnitude = kLargest;
  if (magnitude > kLastRounded) return kNaN;
  if (magnitude < kSmallestNormal) {
    // Denormals are multiples of 2^-9, the spacing of floats at 2^14: the addition rounds to them.
    constexpr uint32_t kSpacing = 0x46800000;  // 2^14
    float value, spacing;
    memcpy(&value, &magnitude, sizeof(value));
    memcpy(&spacing, &kSpacing, sizeof(spacing));
    const float rounded = value + spacing;
    memcpy(&bits, &rounded, sizeof(bits));
    return sign | static_cast<uint8_t>(bits - kSpacing);
  }
  const uint32_t rounded = magnitude + 0x7FFFF + (magnitude >> 20 & 1);  // 23 bits of mantissa to 3
  return sign | static_cast<uint8_t>((rounded >> 20) - ((127 - 7) << 3));
}

// As e4m3fn_bits: the largest finite value is 240, and what rounds to 0 has no sign.
MLA_HOST_DEVICE MLA_FORCE_INLINE uint8_t e4m3fnuz_bits(float x, bool saturate) {
  constexpr uint32_t kInfinity = 0x7F800000;
  constexpr uint32_t kLargest = 0x43700000;         // 240
  constexpr uint32_t kFirstLost = 0x43780000;       // 248, half way to 256, would round to the even 256
  constexpr uint32_t kSmallestNormal = 0x3C000000;  // 2^-7
  constexpr uint8_t kNaN = 0x80;
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > kInfinity) return kNaN;
  if (saturate && magnitude > kLargest) magnitude = kLargest;
  if (magnitude >= kFirstLost) return kNaN;
  uint8_t code;
  if (magnitude < kSmallestNormal) {
    constexpr uint32_t kSpacing = 0x46000000;  // 2^13, where floats are 2^-10 apart as the denormals are
    float value, spacing;
    memcpy(&value, &magnitude, sizeof(value));
    memcpy(&spacing, &kSpacing, sizeof(spacing));
    const float rounded = value + spacing;
    memcpy(&bits, &rounded, sizeof(bits));
    code = static_cast<uint8_t>(bits - kSpacing);
  } else {
    const uint32_t rounded = magnitude + 0x7FFFF + (magnitude >> 20 & 1);
    code = static_cast<uint8_t>((rounded >> 20) - ((127 - 8) << 3));
  }
  return code == 0 ? 0 : sign | code;
}

}  // namespace mla
