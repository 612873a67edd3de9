// The chosen tokens of one piece of indices: slots take the place of the page table.
#pragma once

#include "kernels/decode/gfx9/tokens.h"
#include "kernels/sparse/split.h"

namespace mla::gfx9 {

template <int kBytes>
struct ChosenTokens {
  static constexpr int kTokenBytes = kBytes;
  struct Lookup {
    int32_t slot[kWaveTokens];
  };

  const unsigned char* layer;
  const int32_t* indices;  // the query token's
  uint32_t end;            // of the piece
  uint32_t slots;

  // Rows anywhere; their slots are the same in all lanes.
  struct Rows {
    const unsigned char* layer;
    uint32_t slot[kWaveTokens];

    __device__ __forceinline__ const unsigned char* row(uint32_t number) const {
      return layer + uint64_t{number} * kTokenBytes;
    }
    __device__ __forceinline__ const unsigned char* base(int t) const { return row(slot[t]); }
    static __device__ __forceinline__ constexpr uint32_t offset(int) { return 0; }
    __device__ __forceinline__ const unsigned char* of_lane(int token) const {
      asm volatile("" : "+v"(token));  // else what is compared below is kept in registers throughout
      uint32_t number = slot[0];
#pragma unroll
      for (int t = 1; t < kWaveTokens; ++t) number = token == t ? slot[t] : number;
      return row(number);
    }
    __device__ __forceinline__ const unsigned char* one_of(int t, bool second) const {
      return row(second ? slot[t + 1] : slot[t]);
    }
  };

  __device__ __forceinline__ Lookup look_up(uint32_t first) const {
    Lookup lookup;
    if (first + kWaveTokens <= end) {  // neighbours in memory are one load
#pragma unroll
      for (int t = 0; t < kWaveTokens; ++t) lookup.slot[t] = load_uniform(indices + first + t);
    } else {
#pragma unroll
      for (int t = 0; t < kWaveTokens; ++t) {
        lookup.slot[t] = load_uniform(indices + (first + t < end ? first + t : end - 1));
      }
    }
    return lookup;
  }

  template <class F>
  __device__ __forceinline__ void with_rows(const Lookup& lookup, uint32_t first, F f) const {
    Rows rows;
    rows.layer = layer;
    uint32_t exist = 0;
#pragma unroll
    for (int t = 0; t < kWaveTokens; ++t) {
      const auto slot = static_cast<uint32_t>(lookup.slot[t]);
      const bool valid = slot < slots && first + t < end;
      rows.slot[t] = valid ? slot : 0;
      exist |= valid ? 1u << t : 0;
    }
    f(rows, exist);
  }
};

}  // namespace mla::gfx9
