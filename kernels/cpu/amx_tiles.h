// AMX's tiles: eight registers of 16 rows of 64 bytes, a thread's own between configure and release.
// Written as assembly because a compiler's intrinsics take tile numbers as literals only. JAX_MLA_EMULATE_AMX puts
// plain loops in their place, for tests on machines without AMX.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/vector.h"

namespace mla::MLA_ISA {

constexpr int kTileLines = 16;
constexpr int kTileUnits = 16;  // 32-bit columns

#if defined(JAX_MLA_EMULATE_AMX)

struct EmulatedTiles {
  uint32_t unit[8][kTileLines][kTileUnits];
};
inline thread_local EmulatedTiles emulated_tiles;

inline void configure_tiles() { memset(&emulated_tiles, 0, sizeof(emulated_tiles)); }
inline void release_tiles() { memset(&emulated_tiles, 0xff, sizeof(emulated_tiles)); }

template <int kTile>
inline void zero_tile() {
  memset(emulated_tiles.unit[kTile], 0, sizeof(emulated_tiles.unit[kTile]));
}

template <int kTile>
inline void load_tile(const void* source, int64_t stride_bytes) {
  for (int r = 0; r < kTileLines; ++r) {
    memcpy(emulated_tiles.unit[kTile][r], static_cast<const char*>(source) + r * stride_bytes, 64);
  }
}

template <int kTile>
inline void store_tile(void* target, int64_t stride_bytes) {
  for (int r = 0; r < kTileLines; ++r) {
    memcpy(static_cast<char*>(target) + r * stride_bytes, emulated_tiles.unit[kTile][r], 64);
  }
}

template <int kSum, int kA, int kB>
inline void multiply_tiles() {
  const auto half = [](uint32_t unit, int odd) {
    const uint32_t bits = odd ? unit & 0xffff0000u : unit << 16;
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
  };
  auto& tiles = emulated_tiles.unit;
  for (int m = 0; m < kTileLines; ++m) {
    for (int n = 0; n < kTileUnits; ++n) {
      float sum;
      memcpy(&sum, &tiles[kSum][m][n], sizeof(sum));
      for (int k = 0; k < kTileUnits; ++k) {
        for (int odd = 0; odd < 2; ++odd) sum += half(tiles[kA][m][k], odd) * half(tiles[kB][k][n], odd);
      }
      memcpy(&tiles[kSum][m][n], &sum, sizeof(sum));
    }
  }
}

#else

inline void configure_tiles() {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  static_assert(sizeof(config) == 64, "the layout that ldtilecfg reads");
  asm volatile("ldtilecfg %0" ::"m"(config));
}

inline void release_tiles() { asm volatile("tilerelease" ::); }

template <int kTile>
MLA_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

template <int kTile>
MLA_INLINE void load_tile(const void* source, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(source), "r"(stride_bytes), "i"(kTile) : "memory");
}

template <int kTile>
MLA_INLINE void store_tile(void* target, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(target), "r"(stride_bytes), "i"(kTile) : "memory");
}

// sum[m][n] += a[m][2k] * b[k][2n] + a[m][2k + 1] * b[k][2n + 1], in fp32.
template <int kSum, int kA, int kB>
MLA_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}

#endif

}  // namespace mla::MLA_ISA
