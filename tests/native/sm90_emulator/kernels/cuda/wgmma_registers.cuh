// The emulator's side of kernels/cuda/wgmma_registers.cuh. A is read from the registers when the product is waited for.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace mla::ptx {

inline void ldmatrix_x4(uint32_t shared, uint32_t (&matrices)[4]) {
  emulator::require(shared % 16 == 0, "a row of ldmatrix is aligned to 16 bytes");
  machine.warp().values[0][machine.lane()] = shared;
  machine.meet([](auto&) {});
  for (int matrix = 0; matrix < 4; ++matrix) {
    const uint32_t row = machine.warp().values[0][matrix * 8 + machine.lane() / 4];
    std::memcpy(&matrices[matrix], machine.shared(row + machine.lane() % 4 * 4), 4);
  }
  machine.meet([](auto&) {});
}

// Where the four lanes of this lane's rows keep their part of A.
inline std::array<const uint32_t*, 4> row_registers(const uint32_t* own) {
  const auto address = reinterpret_cast<uintptr_t>(own);
  auto& values = machine.warp().values;
  values[0][machine.lane()] = static_cast<uint32_t>(address);
  values[1][machine.lane()] = static_cast<uint32_t>(address >> 32);
  machine.meet([](auto&) {});
  std::array<const uint32_t*, 4> registers;
  for (int t = 0; t < 4; ++t) {
    const int lane = machine.lane() / 4 * 4 + t;
    registers[t] = reinterpret_cast<const uint32_t*>(uintptr_t{values[1][lane]} << 32 | values[0][lane]);
  }
  machine.meet([](auto&) {});
  return registers;
}

// The two rows of A that this lane's sums belong to. a[i]: row i % 2, columns 8 * (i / 2) + 2 * lane.
template <class Element, int kDepth>
std::array<std::array<float, kDepth>, 2> left_rows(const std::array<const uint32_t*, 4>& registers) {
  std::array<std::array<float, kDepth>, 2> rows;
  for (int lane = 0; lane < 4; ++lane) {
    for (int i = 0; i < 4; ++i) {
      Vector<Element, 2> pair;
      std::memcpy(static_cast<void*>(&pair), &registers[lane][i], sizeof(pair));
      for (int e = 0; e < 2; ++e) rows[i % 2][i / 2 * 8 + 2 * lane + e] = to_float(pair.at[e]);
    }
  }
  return rows;
}

template <int kPieces>
uint32_t wide_operand(uint32_t shared) {
  return uint32_t{kPieces >> 4} << 16 | (shared & 0x3FFFF) >> 4;
}

template <class Element, bool kTransposed>
void wgmma_registers(float (&sums)[64], const uint32_t (&a)[4], uint32_t b, bool accumulate) {
  constexpr int kDepth = 16, kColumns = 128;
  machine.thread().open.push_back([d = &sums[0], registers = row_registers(a), b, accumulate] {
    const int t = machine.lane() % 4;
    const auto rows = left_rows<Element, kDepth>(registers);
    const uint32_t stride = (b >> 16) << 4;
    for (int j = 0; j < kColumns / 8; ++j) {
      const int half = kTransposed ? j / 8 : 0;
      const Matrix right(matrix_descriptor((b & 0xFFFF) + half * (stride >> 4)));
      for (int e = 0; e < 2; ++e) {
        const int column = j * 8 + 2 * t + e;
        float sum[2] = {0, 0};
        for (int k = 0; k < kDepth; ++k) {
          const float value = kTransposed ? right.at<Element>(k, column % 64) : right.at<Element>(column, k);
          sum[0] += rows[0][k] * value;
          sum[1] += rows[1][k] * value;
        }
        for (int half_row = 0; half_row < 2; ++half_row) {
          float& target = d[4 * j + 2 * half_row + e];
          target = (accumulate ? target : 0) + sum[half_row];
        }
      }
    }
  });
}

}  // namespace mla::ptx
