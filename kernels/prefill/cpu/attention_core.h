// Prefill attention over one work item, for any instruction set: tiles of queries by blocks of keys, an online softmax
// in base 2.
//
// A block of keys and values is staged once and met by all tiles of the item. Lanes are queries throughout: scores are
// [key][row] and the weighted values [column][row], so that the softmax runs down the lanes without a sum across them,
// and both products are the same one.
//
// An Arithmetic has
//   Unit, kPack, kBytes              what one lane multiplies, the elements it holds, an element's bytes in memory
//   units(row, unit)                 kLanes units of a row of q or k
//   value_units(rows, column)        kLanes columns of kPack rows of v as units; a null row is zeros
//   not_finite(units)                lanes that hold an infinity or a NaN
//   scores, accumulate(tile, w)      the two products
//   store_probabilities(w, unit, row, p)   kPack vectors of probabilities as a vector of units
#pragma once

#include "kernels/prefill/cpu/stage.h"

namespace mla::MLA_ISA::prefill {

// ---- The softmax.

template <typename Tile, typename W>
inline void set_limits(const PrefillItem& item, const Tile& tile, int64_t first, const W& w) {
  for (int32_t row = 0; row < kTileRows; ++row) {
    const int64_t limit = row < tile.rows ? limit_of(item, tile.first + row) - first : 0;
    w.row_limit[row] = static_cast<int32_t>(limit < 0 ? 0 : limit > kBlockKeys ? kBlockKeys : limit);
  }
}

// Turns the scores of one vector of rows into probabilities, and scales down what the rows have summed up so far.
template <typename A, bool kMasked, typename Tile, typename W>
MLA_INLINE void softmax_rows(const Tile& tile, W& w, int32_t keys, float scale, int64_t row) {
  const Float minus_infinity = broadcast(-__builtin_inff());
  const Int limit = load_bits<Int>(w.row_limit + row);
  const float* const scores = w.scores + row;
  const auto score = [&](int32_t j) {
    const Float s = load(scores + j * kStride) * scale;
    if (!kMasked) return s;
    return broadcast(w.position[j]) < limit ? s : minus_infinity;
  };
  const Float old_max = load(tile.row_max + row);
  Float maxima[4] = {old_max, old_max, old_max, old_max};  // apart, so that one needs not wait for the other
  for (int32_t j = 0; j < keys; j += 4) {
    for (int i = 0; i < 4; ++i) maxima[i] = max_of(maxima[i], score(j + i));
  }
  const Float new_max = max_of(max_of(maxima[0], maxima[1]), max_of(maxima[2], maxima[3]));
  // A row that has seen nothing yet keeps -inf; subtracting 0 instead makes its probabilities 0, not NaN.
  const Float subtracted = new_max == minus_infinity ? Float{} : new_max;
  Float sums[2] = {};
  Ahead ahead = w.ahead;
  for (int32_t j = 0; j < keys; j += 2) {
    const Float p[2] = {exp2_of(score(j) - subtracted), exp2_of(score(j + 1) - subtracted)};
    sums[0] += p[0];
    sums[1] += p[1];
    A::store_probabilities(w, j, row, p);
    ahead.step();
    ahead.step();
  }
  w.ahead = ahead;
  const Float factor = exp2_of(old_max - subtracted);
  store(tile.row_max + row, new_max);
  store(tile.row_sum + row, load(tile.row_sum + row) * factor + (sums[0] + sums[1]));
  const Float one = broadcast(1.0f);
  if (memcmp(&factor, &one, sizeof(one)) == 0) return;
  for (int64_t column = 0; column < kNope; ++column) {
    float* const target = tile.sums + column * kStride + row;
    store(target, load(target) * factor);
  }
}

// Rows that see a value which is not finite become NaN; to all others it is as if it were not there.
template <typename Tile, typename W>
inline void spoil_rows(const Tile& tile, const W& w) {
  for (int32_t i = 0; i < w.unusable_count; ++i) {
    for (int32_t row = 0; row < tile.rows; ++row) {
      if (w.unusable[i] >= w.row_limit[row]) continue;
      for (int64_t column = 0; column < kNope; ++column) tile.sums[column * kStride + row] = __builtin_nanf("");
    }
  }
}

template <typename A, typename Tile, typename W>
inline void attend_block(const PrefillItem& item, const Tile& tile, int64_t first, W& w) {
  const int32_t vectors = (tile.rows + kLanes - 1) / kLanes;
  const int64_t visible = tile.end - first;
  const int32_t keys = steps_end(visible < w.count ? static_cast<int32_t>(visible) : w.count);
  set_limits(item, tile, first, w);
  A::scores(tile, w, keys, vectors);
  const bool masked = !w.whole || w.row_limit[0] < keys;
  for (int32_t v = 0; v < vectors; ++v) {
    if (masked) {
      softmax_rows<A, true>(tile, w, keys, item.score_scale, v * kLanes);
    } else {
      softmax_rows<A, false>(tile, w, keys, item.score_scale, v * kLanes);
    }
  }
  A::accumulate(tile, w, keys, vectors);
  spoil_rows(tile, w);
}

// ---- One item.

template <typename Tile>
inline void reset(const PrefillItem& item, int32_t first, Tile& tile) {
  const int32_t left = item.rows - first;
  tile.first = first;
  tile.rows = left < kTileRows ? left : kTileRows;
  tile.end = limit_of(item, first + tile.rows - 1);
  for (int32_t row = 0; row < kTileRows; ++row) {
    tile.row_max[row] = -__builtin_inff();
    tile.row_sum[row] = 0;
  }
  memset(tile.sums, 0, kNope * kStride * sizeof(float));
}

// How much of a row's output is the carry and how much is new; the row is left alone where nothing is.
struct Share {
  float carry, added;
};

inline Share merge_lse(float& lse, float added) {
  if (!__builtin_isfinite(added)) return {1, 0};
  if (!__builtin_isfinite(lse)) {
    lse = added;
    return {0, 1};
  }
  const float largest = lse > added ? lse : added;
  const float weight_carry = __builtin_expf(lse - largest), weight_added = __builtin_expf(added - largest);
  const float sum = weight_carry + weight_added;
  lse = largest + __builtin_logf(sum);
  return {weight_carry / sum, weight_added / sum};
}

template <typename Tile>
inline void finish(const PrefillItem& item, const Tile& tile) {
  Share shares[kTileRows];
  alignas(64) float scales[kTileRows] = {};
  for (int32_t row = 0; row < tile.rows; ++row) {
    const bool empty = tile.row_max[row] == -__builtin_inff() && tile.row_sum[row] == 0;
    constexpr float kLog2 = 0.693147180559945f;
    const float lse = empty ? -__builtin_inff() : tile.row_max[row] * kLog2 + __builtin_logf(tile.row_sum[row]);
    float& target = item.lse[(tile.first + row) * item.lse_stride];
    shares[row] = item.merge ? merge_lse(target, lse) : Share{0, 1};
    if (!item.merge) target = lse;
    scales[row] = empty ? 0.0f : shares[row].added / tile.row_sum[row];
  }
  with_dtype(item.out_dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::kValue;
    for (int32_t first = 0; first < tile.rows; first += kLanes) {
      for (int64_t column = 0; column < kNope; column += kLanes) {
        Int rows[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          rows[i] = as_int(load(tile.sums + (column + i) * kStride + first) * load(scales + first));
        }
        transpose(rows);
        for (int32_t i = 0; i < kLanes && first + i < tile.rows; ++i) {
          const Share share = shares[first + i];
          if (share.added == 0) continue;
          const int64_t offset = (tile.first + first + i) * item.out_stride + column;
          char* const target = static_cast<char*>(item.out) + offset * bytes_of(kType);
          Float x = as_float(rows[i]);
          if (share.carry != 0) x += load_as_float<kType>(target) * share.carry;
          store_from_float<kType>(target, x);
        }
      }
    }
  });
}

inline int32_t block_keys(int64_t first, int64_t end) {
  const int64_t left = end - first;
  return static_cast<int32_t>(left < 0 ? 0 : left < kBlockKeys ? left : kBlockKeys);
}

template <typename A>
inline Ahead ahead_of(const PrefillItem& item, int64_t first, int32_t keys) {
  Ahead ahead{};
  if (keys == 0) return ahead;
  // Rope keys of an array of their own are few, and one head's are all heads'.
  const bool rope_follows = item.rope == static_cast<const char*>(item.nope) + kNope * A::kBytes;
  ahead.key_stride = item.nope_stride * A::kBytes;
  ahead.value_stride = item.v_stride * A::kBytes;
  ahead.key = static_cast<const char*>(item.nope) + first * ahead.key_stride;
  ahead.value = static_cast<const char*>(item.v) + first * ahead.value_stride;
  ahead.left = keys;
  ahead.key_lines = (rope_follows ? kHeadDim : kNope) * A::kBytes / 64;
  ahead.lines = ahead.key_lines + kNope * A::kBytes / 64;
  return ahead;
}

template <typename A>
inline void attend(const PrefillItem& item, void* scratch) {
  Workspace<typename A::Unit, A::kPack> w;
  w.carve(scratch);
  int32_t tiles = 0;
  int64_t end = 0;
  for (int32_t first = 0; first < item.rows; first += kTileRows, ++tiles) {
    reset(item, first, w.tiles[tiles]);
    if (w.tiles[tiles].end > 0) stage_queries<A>(item, w.tiles[tiles]);
    if (w.tiles[tiles].end > end) end = w.tiles[tiles].end;
  }
  for (int64_t first = 0; first < end; first += kBlockKeys) {
    stage_block<A>(item, first, block_keys(first, end), w);
    w.ahead = ahead_of<A>(item, first + kBlockKeys, block_keys(first + kBlockKeys, end));
    for (int32_t t = 0; t < tiles; ++t) {
      if (first < w.tiles[t].end) attend_block<A>(item, w.tiles[t], first, w);
    }
  }
  for (int32_t t = 0; t < tiles; ++t) finish(item, w.tiles[t]);
}

template <typename A>
inline int64_t scratch_bytes() {
  return Workspace<typename A::Unit, A::kPack>{}.carve(nullptr);
}

}  // namespace mla::MLA_ISA::prefill
