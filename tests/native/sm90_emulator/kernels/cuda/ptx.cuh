// The emulator's side of kernels/cuda/ptx.cuh: what the Hopper kernel takes from there.
#pragma once

#include "tests/native/sm90_emulator/machine.h"

namespace mla::ptx {

inline uint32_t shared_address(const void* pointer) {
  const auto offset = static_cast<const unsigned char*>(pointer) - sm90::shared_base;
  emulator::require(offset >= 0 && offset < emulator::kSharedBytes, "a pointer outside shared memory");
  return emulator::kSharedStart + static_cast<uint32_t>(offset);
}

inline float exp2_approximate(float x) { return std::exp2(x); }

inline void launch_dependents() {}

}  // namespace mla::ptx
