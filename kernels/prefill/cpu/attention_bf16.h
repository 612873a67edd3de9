// Arithmetic in pairs of bf16 summed in fp32 (vdpbf16ps), for bf16 inputs.
#pragma once

#include "kernels/cpu/units.h"
#include "kernels/prefill/cpu/attention_core.h"
#include "kernels/prefill/cpu/products.h"

namespace mla::MLA_ISA::prefill {

struct BFloat16Pairs : PairUnits {
  static constexpr int64_t kBytes = 2;

  static MLA_INLINE Int units(const char* row, int64_t unit) { return load_bits<Int>(row + unit * sizeof(Unit)); }

  static MLA_INLINE Int value_units(const char* const* rows, int64_t column) {
    const auto columns = [&](const char* row) {
      return row == nullptr ? Int{} : __builtin_convertvector(load_bits<Half>(row + column * kBytes), Int);
    };
    return columns(rows[0]) | columns(rows[1]) << 16;
  }

  static MLA_INLINE Int not_finite(Int units) {
    return ((units & 0x7f80) == 0x7f80) | ((units & 0x7f800000) == 0x7f800000);
  }

  template <typename Tile, typename W>
  static void scores(const Tile& tile, const W& w, int32_t keys, int32_t vectors) {
    product<PairUnits, false>(w.keys, W::kKeyUnits, keys, tile.queries, W::kKeyUnits, vectors, w.scores);
  }

  template <typename W>
  static MLA_INLINE void store_probabilities(const W& w, int32_t key, int64_t row, const Float (&p)[2]) {
    const auto narrow = [](Float x) {
      const __m256bh half = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(x));
      return __builtin_convertvector(reinterpret_cast<Half>(half), Int);
    };
    const Int pair = narrow(p[0]) | narrow(p[1]) << 16;
    memcpy(w.probabilities + key / kPack * kStride + row, &pair, sizeof(pair));
  }

  template <typename Tile, typename W>
  static void accumulate(const Tile& tile, const W& w, int32_t keys, int32_t vectors) {
    product<PairUnits, true>(w.values, W::kValueStride, kNope, w.probabilities, keys / kPack, vectors, tile.sums);
  }
};

}  // namespace mla::MLA_ISA::prefill
