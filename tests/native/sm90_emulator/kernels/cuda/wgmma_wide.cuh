// The emulator's side of kernels/cuda/wgmma_wide.cuh.
#pragma once

#include "kernels/cuda/wgmma_registers.cuh"

namespace mla::ptx {

template <int kPieces>
uint32_t wide_operand(uint32_t shared) {
  return uint32_t{kPieces >> 4} << 16 | (shared & 0x3FFFF) >> 4;
}

template <class Element, int kLines>
void wgmma_wide(float (&sums)[128], const uint32_t (&a)[4], uint32_t b) {
  constexpr int kDepth = 16, kPieceColumns = 64;
  machine.thread().open.push_back([d = &sums[0], registers = row_registers(a), b] {
    const int t = machine.lane() % 4;
    const auto rows = left_rows<Element, kDepth>(registers);
    const uint32_t pieces = (b >> 16) << 4;
    for (int piece = 0; piece < 4; ++piece) {
      const Matrix right(matrix_descriptor<kLines>((b & 0xFFFF) + piece * (pieces >> 4)));
      for (int j = 0; j < kPieceColumns / 8; ++j) {
        for (int e = 0; e < 4; ++e) {
          float sum = 0;
          for (int k = 0; k < kDepth; ++k) {
            sum += rows[e / 2][k] * right.at<Element>(k, j * 8 + 2 * t + e % 2);
          }
          d[piece * 32 + 4 * j + e] += sum;
        }
      }
    }
  });
}

}  // namespace mla::ptx
