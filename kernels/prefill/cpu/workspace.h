// Scratch of one attention item, carved out of one allocation. All of it is read with lanes along the queries, or by
// broadcasts.
#pragma once

#include "kernels/cpu/vector.h"
#include "kernels/prefill/cpu/attention.h"

namespace mla::MLA_ISA::prefill {

constexpr int32_t kTileRows = cpu::kPrefillTileRows;
constexpr int32_t kItemTiles = cpu::kPrefillItemTiles;

// Added to the length of rows that are walked down a column: rows a power of two apart share few sets of a cache.
constexpr int64_t kSkew = 16;
constexpr int64_t kStride = kTileRows + kSkew;

// Keys worked on at once. More of them load and store the sums less often, and scores are to stay in a cache near by.
#ifndef MLA_BLOCK_KEYS
#define MLA_BLOCK_KEYS 64
#endif
constexpr int32_t kBlockKeys = MLA_BLOCK_KEYS;

// The products take keys by this many; those past the last are zeros that nobody sees.
constexpr int32_t kKeyStep = 32;
static_assert(kBlockKeys % kKeyStep == 0, "a block is whole steps");

inline int32_t steps_end(int32_t keys) { return (keys + kKeyStep - 1) / kKeyStep * kKeyStep; }

// A row of the item sees the keys below this.
inline int64_t limit_of(const cpu::PrefillItem& item, int64_t row) {
  const int64_t limit = item.first_limit + (item.causal ? row : 0);
  return limit < 0 ? 0 : limit > item.keys ? item.keys : limit;
}

// The queries of a tile and what they have seen so far.
template <typename Unit, int kPack>
struct Tile {
  Unit* queries;   // [kHeadDim / kPack][kStride]
  float* sums;     // [kNope][kStride]: weighted values, before they are divided by row_sum
  float* row_max;  // [kTileRows], in exponents of 2
  float* row_sum;  // [kTileRows]
  int32_t first;   // row of the item
  int32_t rows;
  int64_t end;  // the last row sees keys below it, the others no more than that
};

// Asks for the keys and values of the next block a line at a time, so that memory works while this block is computed
// with: rows of one head are far apart, and no machine guesses the next one.
struct Ahead {
  const char* key;
  const char* value;
  int64_t key_stride, value_stride;  // bytes
  int32_t left;                      // keys
  int32_t key_lines, lines;          // of a key, and of a key and its value
  int32_t line;

  MLA_INLINE void step() {
    if (left == 0) return;
    __builtin_prefetch(line < key_lines ? key + line * 64 : value + (line - key_lines) * 64, 0, 2);
    if (++line < lines) return;
    line = 0;
    key += key_stride;
    value += value_stride;
    --left;
  }
};

template <typename Unit_, int kPack>
struct Workspace {
  using Unit = Unit_;
  static constexpr int64_t kKeyUnits = kHeadDim / kPack;
  static constexpr int64_t kBlockUnits = kBlockKeys / kPack;  // along the keys of a block
  static constexpr int64_t kValueStride = kBlockUnits + kSkew;

  Tile<Unit, kPack> tiles[kItemTiles];
  Unit* keys;           // [kBlockKeys][kKeyUnits]
  Unit* values;         // [kNope][kValueStride]: packed along the keys
  float* scores;        // [kBlockKeys][kStride]
  Unit* probabilities;  // [kBlockUnits][kStride], packed along the keys
  int32_t* position;    // [kBlockKeys]: a key's index in the block; INT32_MAX where nobody sees it
  int32_t* row_limit;   // [kTileRows]: a row sees positions below it
  int32_t* unusable;    // [kBlockKeys]: positions of keys whose values are not all finite
  int32_t unusable_count;
  int32_t count;  // of the block's keys
  bool whole;     // everybody may see all of the block's steps
  Ahead ahead;

  // With memory null only measures.
  int64_t carve(void* memory) {
    int64_t used = 0;
    const auto take = [&](auto*& pointer, int64_t units) {
      pointer = reinterpret_cast<decltype(+pointer)>(reinterpret_cast<uintptr_t>(memory) + used);
      used += (units * 4 + 63) / 64 * 64;
    };
    for (auto& tile : tiles) {
      take(tile.queries, kKeyUnits * kStride);
      take(tile.sums, kNope * kStride);
      take(tile.row_max, kTileRows);
      take(tile.row_sum, kTileRows);
    }
    take(keys, kBlockKeys * kKeyUnits);
    take(values, kNope * kValueStride);
    take(scores, kBlockKeys * kStride);
    take(probabilities, kPack == 1 ? 0 : kBlockUnits * kStride);
    if (kPack == 1) probabilities = reinterpret_cast<Unit*>(scores);
    take(position, kBlockKeys);
    take(row_limit, kTileRows);
    take(unusable, kBlockKeys);
    return used;
  }
};

}  // namespace mla::MLA_ISA::prefill
