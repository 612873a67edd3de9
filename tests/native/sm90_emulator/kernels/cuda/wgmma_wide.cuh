// The emulator's side of kernels/cuda/wgmma_wide.cuh.
#pragma once

#include "kernels/cuda/wgmma.cuh"

namespace mla::ptx {

template <int kStride>
uint32_t wide_operand(uint32_t shared) {
  return uint32_t{kStride >> 4} << 16 | (shared & 0x3FFFF) >> 4;
}

template <class Element>
void wgmma_wide(float (&sums)[128], uint32_t a, uint32_t b) {
  constexpr int kDepth = 16, kPieceColumns = 64;
  machine.thread().open.push_back([d = &sums[0], left = Matrix(matrix_descriptor(a)), b] {
    const int warp = machine.current / 32 % 4, g = machine.lane() / 4, t = machine.lane() % 4;
    const uint32_t stride = (b >> 16) << 4;
    for (int piece = 0; piece < 4; ++piece) {
      const Matrix right(matrix_descriptor((b & 0xFFFF) + piece * (stride >> 4)));
      for (int j = 0; j < kPieceColumns / 8; ++j) {
        for (int e = 0; e < 4; ++e) {
          float sum = 0;
          for (int k = 0; k < kDepth; ++k) {
            sum += left.at<Element>(warp * 16 + e / 2 * 8 + g, k) * right.at<Element>(k, j * 8 + 2 * t + e % 2);
          }
          d[piece * 32 + 4 * j + e] += sum;
        }
      }
    }
  });
}

}  // namespace mla::ptx
