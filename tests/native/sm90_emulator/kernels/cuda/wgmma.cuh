// The emulator's side of kernels/cuda/wgmma.cuh: each thread computes its own sums, when it waits for them.
#pragma once

#include "kernels/cuda/element.cuh"
#include "tests/native/sm90_emulator/machine.h"

namespace mla::ptx {

using emulator::machine;

// A descriptor's fields. Stride: from one group of eight lines to the next.
constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;

inline uint32_t matrix_operand(uint32_t shared) { return uint32_t{1024 >> 4} << 16 | (shared & 0x3FFFF) >> 4; }

template <int kStride = 1024>
uint64_t matrix_descriptor(uint32_t operand) {
  return kSwizzle128 | uint64_t{kStride >> 4} << 32 | operand;
}

struct Matrix {
  uint32_t start, stride;

  explicit Matrix(uint64_t descriptor)
      : start((descriptor & 0x3FFF) << 4), stride(static_cast<uint32_t>(descriptor >> 32 & 0x3FFF) << 4) {
    emulator::require(descriptor >> 62 == 1, "operands have the 128-byte swizzle");
  }

  template <class Element>
  float at(int line, int element) const {
    const uint32_t address = start + line / 8 * stride + line % 8 * 128 + element * 2;
    Element value;
    std::memcpy(&value, machine.shared(emulator::Machine::swizzled(address)), sizeof(value));
    return to_float(value);
  }
};

inline void wgmma_fence() {}

inline void wgmma_commit() {
  machine.thread().groups.push_back(std::move(machine.thread().open));
  machine.thread().open.clear();
}

template <int kSums>
void hold(float (&)[kSums]) {}

template <int kPending>
void wgmma_wait() {
  auto& groups = machine.thread().groups;
  while (groups.size() > kPending) {
    machine.maybe_yield();
    for (const emulator::Product& product : groups.front()) product();
    groups.pop_front();
  }
  machine.meet([](auto&) {});  // a warp's products are done together
}

template <class Element, bool kTransposed, int kStride = 1024, int kSums>
void wgmma(float (&sums)[kSums], uint32_t a, uint32_t b, bool accumulate) {
  constexpr int kDepth = 16, kGroups = kSums / 4;
  machine.thread().open.push_back(
      [d = &sums[0], left = Matrix(matrix_descriptor(a)), right = Matrix(matrix_descriptor<kStride>(b)), accumulate] {
        const int warp = machine.current / 32 % 4, g = machine.lane() / 4, t = machine.lane() % 4;
        float rows[2][kDepth];
        for (int half = 0; half < 2; ++half) {
          const int row = warp * 16 + half * 8 + g;
          for (int k = 0; k < kDepth; ++k) {
            rows[half][k] = kTransposed ? left.at<Element>(k, row) : left.at<Element>(row, k);
          }
        }
        for (int j = 0; j < kGroups; ++j) {
          for (int e = 0; e < 2; ++e) {
            float sum[2] = {0, 0};
            for (int k = 0; k < kDepth; ++k) {
              const float value = right.at<Element>(j * 8 + 2 * t + e, k);
              sum[0] += rows[0][k] * value;
              sum[1] += rows[1][k] * value;
            }
            for (int half = 0; half < 2; ++half) {
              float& target = d[4 * j + 2 * half + e];
              target = (accumulate ? target : 0) + sum[half];
            }
          }
        }
      });
}

}  // namespace mla::ptx
