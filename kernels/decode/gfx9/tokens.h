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

// Of the element at so many bytes from `source` on, which an instruction adds by itself.
__device__ __forceinline__ int32_t load_uniform(const int32_t* source, uint32_t bytes) {
  using Bytes = const __attribute__((address_space(4))) unsigned char;
  auto* begin = reinterpret_cast<Bytes*>(reinterpret_cast<uintptr_t>(source));
  return *reinterpret_cast<const __attribute__((address_space(4))) int32_t*>(begin + bytes);
}

// A request's page table, and the part of it that an item has.
template <int kBytes>
struct PageTable {
  static constexpr int kTokenBytes = kBytes;

  const unsigned char* layer;
  const int32_t* table;  // the request's
  uint32_t end;          // of the item's tokens
  uint32_t page_size, last_page, pages;

  __device__ __forceinline__ PageTable(const DecodeParams& p, const Tile& tile, uint32_t end_token,
                                       const unsigned char* layer_begin)
      : layer(layer_begin),
        table(p.page_table + int64_t{uniform(tile.request)} * p.max_pages),
        end(end_token),
        page_size(p.page_size),
        last_page(p.max_pages - 1),
        pages(static_cast<uint32_t>(p.pages)) {}

  // The place in the table of a page that may lie past its end.
  __device__ __forceinline__ uint32_t entry(uint32_t index) const { return index < last_page ? index : last_page; }

  // Which of a wave's eight tokens from `first` on are before the end, a bit each; `whole`: all are.
  __device__ __forceinline__ uint32_t existing(uint32_t first, bool whole) const {
    if (whole) return (1u << kWaveTokens) - 1;
    return (1u << (first < end ? min_of(static_cast<int32_t>(end - first), kWaveTokens) : 0)) - 1;
  }
};

// Sources of tokens have
//   look_up(first), of a wave's eight tokens from `first` on, a multiple of eight; it is done a block ahead;
//   look_further(lookup, distance, first), the same for tokens `distance` further, which begin with `first`;
//   with_rows(lookup, first, whole, f), which calls f(rows, valid): where they are, and which exist, a bit each. The
//   row of one that does not is some other one. `whole`: all are before the end.
// Row t begins at base(t, before) + before + offset(t) in every lane. Where rows have no base in common, it begins at
// of_lane(t) for t of each lane, and at one_of(t, false); the one behind it at one_of(t, true).

// Tokens in pages of a multiple of eight: a wave's eight are neighbours in memory.
template <int kBytes>
struct PagedTokens : PageTable<kBytes> {
  using PageTable<kBytes>::PageTable;
  struct Lookup {
    uint32_t index;   // of the page in the table
    uint32_t offset;  // of the wave's first token in it
    int32_t page;     // its id
  };

  struct Rows {
    static constexpr bool kOneBase = true;
    const unsigned char* first;
    __device__ __forceinline__ const unsigned char* base(int, int32_t before = 0) const { return first - before; }
    static __device__ __forceinline__ constexpr uint32_t offset(int t) { return t * kBytes; }
  };

  __device__ __forceinline__ Lookup look_up(uint32_t first) const {
    const uint32_t index = first / this->page_size;
    return {index, first - index * this->page_size, page(index)};
  }

  // Without a division, which takes as many instructions as the copies.
  __device__ __forceinline__ void look_further(Lookup& lookup, uint32_t distance, uint32_t) const {
    lookup.offset += distance;
#pragma clang loop unroll(disable) vectorize(disable)
    while (lookup.offset >= this->page_size) {
      lookup.offset -= this->page_size;
      ++lookup.index;
    }
    lookup.page = page(lookup.index);
  }

  template <class F>
  __device__ __forceinline__ void with_rows(const Lookup& lookup, uint32_t first, bool whole, F f) const {
    const bool valid = static_cast<uint32_t>(lookup.page) < this->pages;
    const uint32_t slot = valid ? lookup.page * this->page_size + lookup.offset : 0;  // the host checked that it fits
    f(Rows{this->layer + uint64_t{slot} * kBytes}, valid ? this->existing(first, whole) : 0);
  }

 private:
  // Its id. The pages of a request's tokens, of which there are less than 2^31, are less than 2^28.
  __device__ __forceinline__ int32_t page(uint32_t index) const {
    return load_uniform(this->table, this->entry(index) * 4);
  }
};

// Tokens in pages of any size: each is looked up when its rows are asked for, which waits for all loads on their way:
// right, and slow.
template <int kBytes>
struct ScatteredTokens : PageTable<kBytes> {
  using PageTable<kBytes>::PageTable;
  struct Lookup {};

  struct Rows {
    static constexpr bool kOneBase = false;
    const unsigned char* layer;
    uint32_t slot;  // of token lane / 8
    __device__ __forceinline__ const unsigned char* base(int t, int32_t before = 0) const {
      return layer - before + uint64_t{static_cast<uint32_t>(__builtin_amdgcn_readlane(slot, t * 8))} * kBytes;
    }
    static __device__ __forceinline__ constexpr uint32_t offset(int) { return 0; }
    __device__ __forceinline__ const unsigned char* of_lane(int token) const {
      return layer + uint64_t{shuffle(slot, token * 8)} * kBytes;
    }
    __device__ __forceinline__ const unsigned char* one_of(int t, bool second) const { return of_lane(t + second); }
  };

  __device__ __forceinline__ Lookup look_up(uint32_t) const { return {}; }
  __device__ __forceinline__ void look_further(Lookup&, uint32_t, uint32_t) const {}

  template <class F>
  __device__ __forceinline__ void with_rows(const Lookup&, uint32_t first, bool whole, F f) const {
    const uint32_t token = first + lane_id() / 8, index = token / this->page_size;
    const auto page = static_cast<uint32_t>(this->table[this->entry(index)]);
    const bool valid = page < this->pages;
    const uint64_t lanes = ballot(valid);
    uint32_t exist = 0;
#pragma unroll
    for (int t = 0; t < kWaveTokens; ++t) exist |= static_cast<uint32_t>(lanes >> t * 8 & 1) << t;
    f(Rows{this->layer, valid ? page * this->page_size + token % this->page_size : 0},
      exist & this->existing(first, whole));
  }
};

}  // namespace mla::gfx9
