// Values of pack_kv_fp8 in the tiles that the fp8 prefill kernel reads, on AMD.
#pragma once

#include "kernels/pack/shape.h"

namespace mla {

// Values in tiles, as kValueTile says, by a thread for two columns of a (tile, head). Keys are another kernel's.
template <class Input>
__device__ __forceinline__ void tile_values(const PackKvParams& p) {
  constexpr int kRowThreads = kNope / 2;
  const int64_t row = (int64_t{blockIdx.x} * kPackThreads + threadIdx.x) / kRowThreads,
                first = row / p.heads * kValueTile;
  if (first >= p.tokens) return;
  const int column = threadIdx.x % kRowThreads * 2;
  const Input* up = static_cast<const Input*>(p.kv_up) + (first * p.heads + row % p.heads) * kUpWidth + kNope + column;
  const int64_t left = p.tokens - first;
  using Pair = Vector<Input, 2>;
  Pair read[kValueTile];
#pragma unroll
  for (int key = 0; key < kValueTile; ++key) {
    if (key < left) read[key] = *reinterpret_cast<const Pair*>(up + int64_t{key} * p.heads * kUpWidth);
  }
  const Divisor divide(scale_of(p.packed_v_scale));
  uint8_t* target = static_cast<uint8_t*>(p.v) + (row * kNope + column) * kValueTile;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float x[kValueTile];
#pragma unroll
    for (int key = 0; key < kValueTile; ++key) x[key] = key < left ? divide.divide(to_float(read[key].at[e])) : 0;
    uint32_t words[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint32_t high = e4m3fn_pair(x[2 * q + 8], x[2 * q + 9], p.saturate);
      words[q] = e4m3fn_pair(x[2 * q], x[2 * q + 1], p.saturate) | high << 16;
    }
    store_words(target + e * kValueTile, words[0], words[1], words[2], words[3]);
  }
}

}  // namespace mla
