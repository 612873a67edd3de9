// What one lane multiplies at a time: 32 bits, a float or a pair of bf16.
#pragma once

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "kernels/cpu/vector.h"

namespace mla::MLA_ISA {

struct FloatUnits {
  using Unit = float;
  using Lanes = Float;
  static constexpr int kPack = 1;  // elements in a unit

  static MLA_INLINE Lanes load(const Unit* source) { return load_bits<Float>(source); }
  static MLA_INLINE Lanes broadcast_unit(const Unit* source) { return broadcast(*source); }
  static MLA_INLINE Float multiply_add(Float sum, Lanes a, Lanes b) { return sum + a * b; }
};

#if defined(__AVX512BF16__)

using PairUnit = uint32_t;  // two bf16, the one of the lower index in the low half

struct PairUnits {
  using Unit = PairUnit;
  using Lanes = __m512i;
  static constexpr int kPack = 2;

  static MLA_INLINE Lanes load(const Unit* source) { return _mm512_loadu_si512(source); }
  static MLA_INLINE Lanes broadcast_unit(const Unit* source) { return _mm512_set1_epi32(load_bits<int32_t>(source)); }
  static MLA_INLINE Float multiply_add(Float sum, Lanes a, Lanes b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

#endif

}  // namespace mla::MLA_ISA
