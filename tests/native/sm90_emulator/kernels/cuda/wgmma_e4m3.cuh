// The emulator's side of kernels/cuda/wgmma_e4m3.cuh. A is read from the registers when the product is waited for.
#pragma once

#include <numeric>

#include "kernels/cuda/wgmma_registers.cuh"

namespace mla::ptx {

struct ShortLines {
  static float at(uint32_t operand, int line, int element) {
    const uint32_t address = ((operand & 0x3FFF) << 4) + line * 64 + element;
    return to_float(E4M3FN{*machine.shared(emulator::Machine::swizzled_64(address))});
  }
};

struct Tiles {
  static float at(uint32_t operand, int line, int element) {
    const uint32_t tile = (operand >> 16) << 4;
    const uint32_t address = ((operand & 0x3FFF) << 4) + element / 16 * tile + line * 16 + element % 16;
    return to_float(E4M3FN{*machine.shared(address)});
  }
};

// Of products and what they are added to, the tensor cores keep 14 bits, counted from the largest one's first.
template <size_t kCount>
float add_with_14_bits(const std::array<float, kCount>& addends) {
  float largest = 0;
  for (float x : addends) {
    if (!std::isfinite(x)) return std::accumulate(addends.begin(), addends.end(), 0.0f);
    largest = std::max(largest, std::fabs(x));
  }
  if (largest == 0) return 0;
  const int last_bit = std::ilogb(largest) - 13;
  double sum = 0;
  for (float x : addends) sum += std::trunc(std::ldexp(double{x}, -last_bit));
  return static_cast<float>(std::ldexp(sum, last_bit));
}

template <class Layout>
void wgmma_e4m3(float (&sums)[64], const uint32_t (&a)[4], uint32_t b, bool accumulate) {
  constexpr int kDepth = 32, kColumns = 128;
  machine.thread().open.push_back([d = &sums[0], registers = row_registers(a), b, accumulate] {
    const int t = machine.lane() % 4;
    float rows[2][kDepth];
    for (int lane = 0; lane < 4; ++lane) {
      for (int i = 0; i < 4; ++i) {
        for (int e = 0; e < 4; ++e) {
          rows[i % 2][i / 2 * 16 + 4 * lane + e] =
              to_float(E4M3FN{static_cast<uint8_t>(registers[lane][i] >> (8 * e))});
        }
      }
    }
    for (int i = 0; i < kColumns / 2; ++i) {
      const int column = i / 4 * 8 + 2 * t + i % 2;
      std::array<float, kDepth + 1> addends;
      for (int k = 0; k < kDepth; ++k) addends[k] = rows[i % 4 / 2][k] * Layout::at(b, column, k);
      addends[kDepth] = accumulate ? d[i] : 0;
      d[i] = add_with_14_bits(addends);
    }
  });
}

}  // namespace mla::ptx
