// Where the tokens of a block lie in the cache: the rows of eight neighbours, which one wave loads.
#pragma once

#include "kernels/decode/gfx9/formats.h"
#include "kernels/decode/work.cuh"

namespace mla::gfx9 {

// A value that every lane reads alike, through the scalar cache: waiting for it does not wait for the loads of tokens.
// No kernel that runs beside this one writes it.
__device__ __forceinline__ int32_t load_uniform(const int32_t* source) {
  return *reinterpret_cast<const __attribute__((address_space(4))) int32_t*>(reinterpret_cast<uintptr_t>(source));
}

// The tokens of a request, through its page table.
//
// Where a page is a multiple of eight tokens, a wave's eight are neighbours in memory, and the page's id is looked up a
// block ahead. Else each token has its own, and looking them up waits for all loads on their way: right, and slow.
template <int kBytes>
struct PagedTokens {
  static constexpr int kTokenBytes = kBytes;
  struct Lookup {
    uint32_t index;   // of the page in the table
    uint32_t offset;  // of the wave's first token in it
    int32_t page;     // its id
  };

  const unsigned char* layer;
  const int32_t* table;  // the request's
  uint32_t end;          // of the item's tokens
  uint32_t page_size, last_page, pages;

  __device__ __forceinline__ PagedTokens(const DecodeParams& p, const Tile& tile, uint32_t end_token,
                                         const unsigned char* layer_begin)
      : layer(layer_begin),
        table(p.page_table + int64_t{uniform(tile.request)} * p.max_pages),
        end(end_token),
        page_size(p.page_size),
        last_page(p.max_pages - 1),
        pages(static_cast<uint32_t>(p.pages)) {}

  // Rows that lie one behind the other. Row t begins at base(t, before) + before + offset(t), the base being the same
  // in all lanes.
  struct Neighbours {
    static constexpr bool kOneBase = true;
    const unsigned char* first;
    __device__ __forceinline__ const unsigned char* base(int, int32_t before = 0) const { return first - before; }
    static __device__ __forceinline__ constexpr uint32_t offset(int t) { return t * kTokenBytes; }
    __device__ __forceinline__ const unsigned char* of_lane(int token) const { return first + token * kTokenBytes; }
    // Of token t, or of the one behind it.
    __device__ __forceinline__ const unsigned char* one_of(int t, bool second) const { return of_lane(t + second); }
  };
  // Rows anywhere.
  struct Scattered {
    static constexpr bool kOneBase = false;
    const unsigned char* layer;
    uint32_t slot;  // of token lane / 8
    __device__ __forceinline__ const unsigned char* base(int t, int32_t before = 0) const {
      return layer - before + uint64_t{static_cast<uint32_t>(__builtin_amdgcn_readlane(slot, t * 8))} * kTokenBytes;
    }
    static __device__ __forceinline__ constexpr uint32_t offset(int) { return 0; }
    __device__ __forceinline__ const unsigned char* of_lane(int token) const {
      return layer + uint64_t{shuffle(slot, token * 8)} * kTokenBytes;
    }
    __device__ __forceinline__ const unsigned char* one_of(int t, bool second) const { return of_lane(t + second); }
  };

  // `first`: the wave's first token, a multiple of eight.
  __device__ __forceinline__ Lookup look_up(uint32_t first) const {
    const uint32_t index = first / page_size;
    return {index, first - index * page_size, page_id(index)};
  }

  // The same for the wave's tokens `distance` further, without a division: it takes as many instructions as the copies.
  __device__ __forceinline__ void look_further(Lookup& lookup, uint32_t distance, uint32_t) const {
    if (page_size % kWaveTokens != 0) return;  // each token is looked up anyway
    lookup.offset += distance;
#pragma clang loop unroll(disable) vectorize(disable)
    while (lookup.offset >= page_size) {
      lookup.offset -= page_size;
      ++lookup.index;
    }
    lookup.page = page_id(lookup.index);
  }

  // f(rows), with which of the eight exist, a bit each; of one that does not, the row is some other one.
  template <class F>
  __device__ __forceinline__ void with_rows(const Lookup& lookup, uint32_t first, F f) const {
    const uint32_t left = first < end ? min_of(static_cast<int32_t>(end - first), kWaveTokens) : 0;
    const uint32_t existing = (1u << left) - 1;
    if (page_size % kWaveTokens == 0) {
      const bool valid = static_cast<uint32_t>(lookup.page) < pages;
      const uint32_t slot = valid ? lookup.page * page_size + lookup.offset : 0;  // the host checked that it fits
      f(Neighbours{layer + uint64_t{slot} * kTokenBytes}, valid ? existing : 0);
      return;
    }
    const uint32_t token = first + lane_id() / 8, index = token / page_size;
    const auto own = static_cast<uint32_t>(table[index < last_page ? index : last_page]);
    const bool valid = own < pages;
    const uint64_t lanes = ballot(valid);
    uint32_t exist = 0;
#pragma unroll
    for (int t = 0; t < kWaveTokens; ++t) exist |= static_cast<uint32_t>(lanes >> t * 8 & 1) << t;
    f(Scattered{layer, valid ? own * page_size + token % page_size : 0}, exist & existing);
  }

 private:
  __device__ __forceinline__ int32_t page_id(uint32_t index) const {
    return load_uniform(table + (index < last_page ? index : last_page));
  }
};

}  // namespace mla::gfx9
