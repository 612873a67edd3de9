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
    // All of p[0] in the low half, all of p[1] in the high one; then lane by lane.
    const auto narrow = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(p[1], p[0]));
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i words = _mm512_or_si512(lane, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(16)), 16));
    const __m512i pairs = _mm512_permutexvar_epi16(words, narrow);
    _mm512_storeu_si512(w.probabilities + key / kPack * kStride + row, pairs);
  }

  template <typename Tile, typename W>
  static void accumulate(const Tile& tile, const W& w, int32_t keys, int32_t vectors) {
    product<PairUnits, true>(w.values, W::kValueStride, kNope, w.probabilities, keys / kPack, vectors, tile.sums);
  }
};

}  // namespace mla::MLA_ISA::prefill
