// The emulator's side of kernels/decode/sm90/fp8/instructions.cuh.
#pragma once

#include "kernels/cuda/wgmma.cuh"
#include "tests/native/sm90_emulator/machine.h"

namespace mla {

using std::max;
using std::min;

namespace ptx {

inline uint32_t f16_from_e4m3_low(uint32_t bytes) {
  return pack<__half>(to_float(E4M3FN{static_cast<uint8_t>(bytes)}),
                      to_float(E4M3FN{static_cast<uint8_t>(bytes >> 8)}));
}

inline uint32_t f16_from_e4m3_high(uint32_t bytes) { return f16_from_e4m3_low(bytes >> 16); }

inline uint32_t multiply_halves(uint32_t first, uint32_t second) {
  __half a[2], b[2];
  std::memcpy(static_cast<void*>(a), &first, sizeof(a));
  std::memcpy(static_cast<void*>(b), &second, sizeof(b));
  return pack<__half>(to_float(a[0]) * to_float(b[0]), to_float(a[1]) * to_float(b[1]));
}

inline uint32_t unzip_bytes(uint32_t b) { return (b & 0xFF0000FF) | (b & 0xFF00) << 8 | (b & 0xFF0000) >> 8; }

// The fragments are read when the product is waited for, where they lie in the threads: one that is overwritten too
// early shows.
template <class Element = __half, int kSums>
void register_wgmma(float (&sums)[kSums], const uint32_t (&a)[4], uint32_t b, bool accumulate) {
  constexpr int kDepth = 16, kGroups = kSums / 4;
  machine.thread().fragment = a;
  machine.meet([](auto&) {});
  std::array<const uint32_t*, 4> quad;
  for (int t = 0; t < 4; ++t) quad[t] = machine.thread_at(machine.current / 4 * 4 + t).fragment;
  machine.meet([](auto&) {});
  machine.thread().open.push_back([d = &sums[0], quad, right = Matrix(matrix_descriptor(b)), accumulate] {
    const int t = machine.lane() % 4;
    float rows[2][kDepth];
    for (int half = 0; half < 2; ++half) {
      for (int k = 0; k < kDepth; ++k) {
        const uint32_t pair = quad[k % 8 / 2][k / 8 * 2 + half];
        const auto bits = static_cast<uint16_t>(k % 2 == 0 ? pair : pair >> 16);
        Element value;
        std::memcpy(static_cast<void*>(&value), &bits, sizeof(value));
        rows[half][k] = to_float(value);
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

}  // namespace ptx
}  // namespace mla
