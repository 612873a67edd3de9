// Both products of attention as one: sums[m][row] (+)= a[m][unit] * b[unit][row], with lanes along the rows, in tiles
// of registers. Scores have a = keys and b = queries; weighted values have a = values and b = probabilities.
#pragma once

#include "kernels/prefill/cpu/workspace.h"

namespace mla::MLA_ISA::prefill {

template <int kValue>
struct Number {
  static constexpr int value = kValue;
};

template <typename A, int kM, int kVectors, bool kAdd>
__attribute__((noinline)) void product_tile(const typename A::Unit* a, int64_t a_stride, const typename A::Unit* b,
                                            int64_t units, float* sums) {
  Float tile[kM][kVectors] = {};
  if (kAdd) {
    for (int m = 0; m < kM; ++m) {
      for (int v = 0; v < kVectors; ++v) tile[m][v] = load(sums + m * kStride + v * kLanes);
    }
  }
  for (int64_t unit = 0; unit < units; ++unit, b += kStride) {
    typename A::Lanes right[kVectors];
    for (int v = 0; v < kVectors; ++v) right[v] = A::load(b + v * kLanes);
    for (int m = 0; m < kM; ++m) {
      const typename A::Lanes left = A::broadcast_unit(a + m * a_stride + unit);
      for (int v = 0; v < kVectors; ++v) tile[m][v] = A::multiply_add(tile[m][v], left, right[v]);
    }
  }
  for (int m = 0; m < kM; ++m) {
    for (int v = 0; v < kVectors; ++v) store(sums + m * kStride + v * kLanes, tile[m][v]);
  }
}

// `m` is a multiple of 8. A tile keeps its sums in registers: 16 of them, or 32 with AVX-512.
template <typename A, bool kAdd>
inline void product(const typename A::Unit* a, int64_t a_stride, int64_t m, const typename A::Unit* b, int64_t units,
                    int32_t vectors, float* sums) {
  constexpr int kM = kLanes == 16 ? 8 : 4;
  int32_t v = 0;
  const auto column = [&](auto width, auto height) {
    for (int64_t i = 0; i < m; i += height.value) {
      product_tile<A, height.value, width.value, kAdd>(a + i * a_stride, a_stride, b + v * kLanes, units,
                                                       sums + i * kStride + v * kLanes);
    }
  };
  for (; v + 3 <= vectors; v += 3) column(Number<3>{}, Number<kM>{});
  if (vectors - v == 2) column(Number<2>{}, Number<kM>{});
  if (vectors - v == 1) column(Number<1>{}, Number<8>{});
}

}  // namespace mla::MLA_ISA::prefill
