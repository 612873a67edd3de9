// Transposes kLanes vectors of 32-bit units in registers.
#pragma once

#if MLA_LANES == 16
#include <immintrin.h>
#endif

#include "kernels/cpu/vector.h"

namespace mla::MLA_ISA {

// Afterwards lane i of rows[j] is what lane j of rows[i] was.
MLA_INLINE void transpose(Int (&rows)[kLanes]) {
#if MLA_LANES == 16
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = reinterpret_cast<__m512i>(rows[i]);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + 2 + j]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + 2 + j]);
    }
  }
  // a[4 g + c] holds column 4 q + c of rows 4 g to 4 g + 3 in its 128-bit quarter q.
  for (int c = 0; c < 4; ++c) {
    const __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
    const __m512i high = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    const __m512i low_odd = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
    const __m512i high_odd = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    rows[c] = reinterpret_cast<Int>(_mm512_shuffle_i32x4(low, high, 0x88));
    rows[4 + c] = reinterpret_cast<Int>(_mm512_shuffle_i32x4(low_odd, high_odd, 0x88));
    rows[8 + c] = reinterpret_cast<Int>(_mm512_shuffle_i32x4(low, high, 0xdd));
    rows[12 + c] = reinterpret_cast<Int>(_mm512_shuffle_i32x4(low_odd, high_odd, 0xdd));
  }
#else
  int32_t units[kLanes][kLanes];
  memcpy(units, rows, sizeof(units));
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) rows[j][i] = units[i][j];
  }
#endif
}

}  // namespace mla::MLA_ISA
