// Arithmetic in fp32, for inputs of every float dtype.
#pragma once

#include "kernels/cpu/units.h"
#include "kernels/prefill/cpu/attention_core.h"
#include "kernels/prefill/cpu/products.h"

namespace mla::MLA_ISA::prefill {

template <DType kType>
struct Float32 : FloatUnits {
  static constexpr int64_t kBytes = bytes_of(kType);

  static MLA_INLINE Int units(const char* row, int64_t unit) {
    return as_int(load_as_float<kType>(row + unit * kBytes));
  }

  static MLA_INLINE Int value_units(const char* const* rows, int64_t column) {
    return rows[0] == nullptr ? Int{} : units(rows[0], column);
  }

  static MLA_INLINE Int not_finite(Int units) { return (units & 0x7f800000) == 0x7f800000; }

  template <typename Tile, typename W>
  static void scores(const Tile& tile, const W& w, int32_t keys, int32_t vectors) {
    product<FloatUnits, false>(w.keys, W::kKeyUnits, keys, tile.queries, W::kKeyUnits, vectors, w.scores);
  }

  template <typename W>
  static MLA_INLINE void store_probabilities(const W& w, int32_t key, int64_t row, const Float (&p)[2]) {
    store(w.probabilities + key * kStride + row, p[0]);
    store(w.probabilities + (key + 1) * kStride + row, p[1]);
  }

  template <typename Tile, typename W>
  static void accumulate(const Tile& tile, const W& w, int32_t keys, int32_t vectors) {
    product<FloatUnits, true>(w.values, W::kValueStride, kNope, w.probabilities, keys, vectors, tile.sums);
  }
};

template <typename A>
constexpr cpu::PrefillKernel kKernel = {scratch_bytes<A>, attend<A>};

constexpr cpu::PrefillKernels kKernels = {kKernel<Float32<DType::kF32>>, kKernel<Float32<DType::kF16>>,
                                          kKernel<Float32<DType::kBF16>>};

}  // namespace mla::MLA_ISA::prefill
