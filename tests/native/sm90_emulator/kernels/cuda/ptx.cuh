// The emulator's side of kernels/cuda/ptx.cuh: what the Hopper kernels take from there.
#pragma once

#include "tests/native/sm90_emulator/machine.h"

namespace mla::ptx {

inline uint32_t shared_address(const void* pointer) {
  const auto offset = static_cast<const unsigned char*>(pointer) - MLA_EMULATED::shared_base;
  emulator::require(offset >= 0 && offset < emulator::kSharedBytes, "a pointer outside shared memory");
  return emulator::kSharedStart + static_cast<uint32_t>(offset);
}

inline float exp2_approximate(float x) { return std::exp2(x); }

inline void launch_dependents() {}

// Every lane reads for itself: the addresses of its matrices' rows are what it needs of the others.
inline void load_matrices(uint32_t (&r)[4], uint32_t shared, bool transposed) {
  auto& machine = emulator::machine;
  emulator::require(shared % 16 == 0, "a row of ldmatrix is aligned to 16 bytes");
  machine.warp().values[0][machine.lane()] = shared;
  machine.meet([](auto&) {});
  const int g = machine.lane() / 4, t = machine.lane() % 4;
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t pair[2];
    for (int e = 0; e < 2; ++e) {
      const int row = transposed ? 2 * t + e : g, column = transposed ? g : 2 * t + e;
      std::memcpy(&pair[e], machine.shared(machine.warp().values[0][matrix * 8 + row]) + 2 * column, sizeof(pair[e]));
    }
    r[matrix] = static_cast<uint32_t>(pair[1]) << 16 | pair[0];
  }
  machine.meet([](auto&) {});
}

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) { load_matrices(r, shared, false); }

inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t shared) { load_matrices(r, shared, true); }

}  // namespace mla::ptx
