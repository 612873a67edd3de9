// The scales of fp8_ds_mla, on every platform.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/host_device.h"

namespace mla {

// Of 128 values whose largest finite magnitude is `largest`; what is stored is value / scale. `power_of_two`: rounded
// up to one.
MLA_HOST_DEVICE MLA_FORCE_INLINE float ds_mla_scale(float largest, bool power_of_two) {
  constexpr float kLeast = 1e-4f, kMostStored = 448.0f;  // e4m3fn's largest; the least keeps a scale of zeros normal
  const float scale = (largest > kLeast ? largest : kLeast) / kMostStored;
  if (!power_of_two) return scale;
  uint32_t bits;
  memcpy(&bits, &scale, sizeof(bits));
  bits = (bits + 0x7FFFFF) & 0x7F800000;
  float rounded;
  memcpy(&rounded, &bits, sizeof(rounded));
  return rounded;
}

}  // namespace mla
