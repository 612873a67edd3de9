// The chosen tokens of one piece of indices: slots take the place of the page table.
#pragma once

#include "kernels/decode/gfx9/tokens.h"
#include "kernels/sparse/split.h"

namespace mla::gfx9 {

// In a scalar register; the compiler would take the vector unit.
__device__ __forceinline__ uint32_t largest_uniform(uint32_t a, uint32_t b) {
  asm("s_max_u32 %0, %1, %2" : "=s"(a) : "s"(a), "s"(b) : "scc");
  return a;
}

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
    static constexpr bool kOneBase = false;
    const unsigned char* layer;
    uint32_t slot[kWaveTokens];

    __device__ __forceinline__ const unsigned char* row(uint32_t number) const {
      return layer + uint64_t{number} * kTokenBytes;
    }
    __device__ __forceinline__ const unsigned char* base(int t, int32_t before = 0) const {
      return layer - before + uint64_t{slot[t]} * kTokenBytes;
    }
    static __device__ __forceinline__ constexpr uint32_t offset(int) { return 0; }
    __device__ __forceinline__ const unsigned char* of_lane(int token) const {
      uint32_t slots = slot[0];  // of token t in lane t
#pragma unroll
      for (int t = 1; t < kWaveTokens; ++t) asm("v_writelane_b32 %0, %1, %2" : "+v"(slots) : "s"(slot[t]), "n"(t));
      return row(shuffle(slots, token));
    }
    __device__ __forceinline__ const unsigned char* one_of(int t, bool second) const {
      return row(second ? slot[t + 1] : slot[t]);
    }
  };

  __device__ __forceinline__ Lookup look_up(uint32_t first) const {
    Lookup lookup;
    const int32_t* own = indices + first;
    if (first + kWaveTokens <= end) {
      // One load. The compiler makes eight of eight, and computes an address for each.
      using Slots = int32_t __attribute__((ext_vector_type(kWaveTokens), aligned(4)));
      const Slots loaded =
          *reinterpret_cast<const __attribute__((address_space(4))) Slots*>(reinterpret_cast<uintptr_t>(own));
#pragma unroll
      for (int t = 0; t < kWaveTokens; ++t) lookup.slot[t] = loaded[t];
    } else {
#pragma unroll
      for (int t = 0; t < kWaveTokens; ++t) {
        lookup.slot[t] = load_uniform(indices + (first + t < end ? first + t : end - 1));
      }
    }
    return lookup;
  }

  __device__ __forceinline__ void look_further(Lookup& lookup, uint32_t, uint32_t first) const {
    lookup = look_up(first);
  }

  template <class F>
  __device__ __forceinline__ void with_rows(const Lookup& lookup, uint32_t first, bool whole, F f) const {
    Rows rows;
    rows.layer = layer;
    uint32_t exist = (1u << kWaveTokens) - 1, largest = 0;
#pragma unroll
    for (int t = 0; t < kWaveTokens; ++t) {
      rows.slot[t] = lookup.slot[t];
      largest = largest_uniform(largest, rows.slot[t]);
    }
    if (largest >= slots || !whole) {  // seldom: else all of them exist
      exist = 0;
#pragma unroll
      for (int t = 0; t < kWaveTokens; ++t) {
        const bool valid = rows.slot[t] < slots && first + t < end;
        rows.slot[t] = valid ? rows.slot[t] : 0;
        exist |= valid ? 1u << t : 0;
      }
    }
    f(rows, exist);
  }
};

}  // namespace mla::gfx9
