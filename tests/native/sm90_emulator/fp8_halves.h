// What the generic decode kernel's fragments of fp8 and its softmax take from CUDA, for an emulated CTA.
#pragma once

#include "tests/native/sm90_emulator/machine.h"

using std::max;
using std::min;

inline bool __syncthreads_or(bool value) {
  auto& machine = mla::emulator::machine;
  return machine.named_barrier(0, machine.count, true, value);
}

inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return result;
}
