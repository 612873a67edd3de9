// Decode attention over one work item, for any instruction set: blocks of tokens, an online softmax in base 2.
//
// Scores are computed transposed, [token][row]: the lanes of a vector are (query, head) rows, a token's element is
// broadcast straight from the cache, and the softmax runs down the lanes without a sum across them. The values are
// then weighted with lanes along the 512 columns. Either product reads 32-bit units: a float, or a pair of bf16.
//
// An Arithmetic has
//   Unit, kPack, Lanes                           what one lane multiplies, how many elements it holds, a vector of them
//   load, broadcast_unit, multiply_add           on Lanes; sums are vectors of floats
//   pack_queries(item, w)                        fills w.queries
//   stage(item, block, w)                        fills w.keys and w.values
//   scores(w, vectors, tokens)                   fills w.scores
//   pack_probabilities(w, vectors, tokens)       fills w.probabilities
//   accumulate(w, rows, tokens)                  adds a block's weighted values to all rows
//   accumulate_first(w, begin, end, tokens)      adds those of its first tokens to some rows
#pragma once

#include "kernels/decode/cpu/attention.h"
#include "kernels/decode/cpu/workspace.h"

namespace mla::MLA_ISA {

using cpu::AttentionItem;

MLA_INLINE int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

// Where a block's tokens lie; null: masked, not to be read.
struct BlockTokens {
  const char* address[kWorkTokens];
  int32_t first;  // token
  int32_t count;
  bool whole;  // none is masked
};

// Of a token in fp8_ds_mla: the scale of a group of its latent, and where its rope begins.
constexpr int64_t kDsMlaRope = kDsMlaBytes - 2 * kRope;

MLA_INLINE float ds_mla_scale(const char* token, int64_t group) {
  float scale;
  memcpy(&scale, token + kLatent + group * sizeof(scale), sizeof(scale));
  return scale;
}

// Tokens of the block from `first` on: many where all rows see them, few where the causal limit falls among them.
MLA_INLINE int32_t block_tokens(int64_t first, int32_t common_end) {
  return first + kWorkTokens <= common_end ? kWorkTokens : kBlockTokens;
}

MLA_INLINE int64_t token_bytes_of(const AttentionItem& item) {
  return item.ds_mla ? kDsMlaBytes : kWidth * bytes_of(item.cache_dtype);
}

inline void locate(const AttentionItem& item, int64_t first, int32_t tokens, int32_t end, BlockTokens& block) {
  const int64_t token_bytes = token_bytes_of(item);
  block.first = static_cast<int32_t>(first);
  block.count = first < end ? smaller(tokens, static_cast<int32_t>(end - first)) : 0;
  block.whole = true;
  for (int32_t t = block.count; t < kWorkTokens; ++t) block.address[t] = nullptr;
  if (item.slots != nullptr) {
    const auto* const cache = static_cast<const char*>(item.cache);
    for (int32_t t = 0; t < block.count; ++t) block.address[t] = cache + item.slots[first + t] * token_bytes;
    return;
  }
  int64_t page_index = first / item.page_size;
  auto offset = static_cast<int32_t>(first % item.page_size);
  for (int32_t t = 0; t < block.count; ++page_index, offset = 0) {
    const int64_t page = item.page_table[page_index];
    const bool valid = page >= 0 && page < item.pages;
    if (!valid) block.whole = false;
    const char* token =
        static_cast<const char*>(item.cache) + (valid ? page * item.page_size + offset : 0) * token_bytes;
    const int32_t page_end = smaller(block.count - t, item.page_size - offset) + t;
    for (; t < page_end; ++t, token += token_bytes) block.address[t] = valid ? token : nullptr;
  }
}

// ---- The two products, in register tiles.

constexpr int64_t kLineUnits = 16;  // of a cache line

// Asks for a line of each of some tokens of the next block, so that memory works while this block is multiplied.
template <int kTokens, typename W>
MLA_INLINE void prefetch_next(const W& w, int32_t token, int64_t unit) {
  if (w.next == nullptr || unit * w.next_unit_bytes >= w.next_token_bytes) return;
  for (int t = 0; t < kTokens; ++t) {
    // In integers, since a masked token's address is null, which a prefetch may be near and a pointer may not.
    const auto address = reinterpret_cast<uintptr_t>(w.next[token + t]) + unit * w.next_unit_bytes;
    __builtin_prefetch(reinterpret_cast<const void*>(address), 0, 2);
  }
}

// Units of a token whose products are summed as one. Scores are the scaled sums of all ranges.
struct UnitRange {
  int64_t begin, end;   // multiples of kLineUnits
  const float* scales;  // [kWorkTokens], of the tokens; null: 1
  bool whole;           // there is no other range
};

// Calls f with each range.
template <typename W, typename F>
MLA_INLINE void for_unit_ranges(const W& w, const F& f) {
  if (w.key_scales == nullptr) return f(UnitRange{0, W::kUnits, nullptr, true});
  constexpr int64_t kGroupUnits = kDsMlaGroup * W::kUnits / kWidth;
  for (int64_t group = 0; group < kLatent / kDsMlaGroup; ++group) {
    f(UnitRange{group * kGroupUnits, (group + 1) * kGroupUnits, w.key_scales + group * kWorkTokens, false});
  }
  f(UnitRange{kLatent * W::kUnits / kWidth, W::kUnits, nullptr, false});
}

// A vector of a range's sums, of one token, to where its scores lie.
template <typename W>
MLA_INLINE void add_scores(const W& w, const UnitRange& range, int32_t token, int64_t row, Float sum) {
  float* const target = w.scores + token * w.stride + row;
  if (!range.whole) {
    if (range.scales != nullptr) sum *= range.scales[token];
    if (range.begin != 0) sum += load(target);
  }
  store(target, sum);
}

template <typename A, int kTokens, int kVectors, typename W>
__attribute__((noinline)) void score_tile(const W& w, const UnitRange& range, int32_t token, int64_t row) {
  using Unit = typename A::Unit;
  const Unit* keys[kTokens];
  for (int t = 0; t < kTokens; ++t) keys[t] = w.keys[token + t];
  const Unit* queries = w.queries + range.begin * w.stride + row;
  Float sums[kTokens][kVectors] = {};
  for (int64_t line = range.begin; line < range.end; line += kLineUnits) {
    if (row == 0) prefetch_next<kTokens>(w, token, line);  // once, by the first rows
    for (int64_t unit = line; unit < line + kLineUnits; ++unit, queries += w.stride) {
      typename A::Lanes q[kVectors];
      for (int v = 0; v < kVectors; ++v) q[v] = A::load(queries + v * kLanes);
      for (int t = 0; t < kTokens; ++t) {
        const typename A::Lanes k = A::broadcast_unit(keys[t] + unit);
        for (int v = 0; v < kVectors; ++v) sums[t][v] = A::multiply_add(sums[t][v], k, q[v]);
      }
    }
  }
  for (int t = 0; t < kTokens; ++t) {
    for (int v = 0; v < kVectors; ++v) add_scores(w, range, token + t, row + v * kLanes, sums[t][v]);
  }
}

template <typename A, int kVectors, int kTokens, typename W>
MLA_INLINE void score_column(const W& w, const UnitRange& range, int32_t vector, int32_t tokens) {
  for (int32_t t = 0; t < tokens; t += kTokens) score_tile<A, kTokens, kVectors>(w, range, t, vector * kLanes);
}

// `tokens` is a multiple of 8. A tile keeps its sums in registers: 16 of them, or 32 with AVX-512.
template <typename A, typename W>
inline void score_block(const W& w, int32_t vectors, int32_t tokens) {
  constexpr int kTokens = kLanes == 16 ? 8 : 4;
  for_unit_ranges(w, [&](const UnitRange& range) {
    int32_t v = 0;
    for (; v + 3 <= vectors; v += 3) score_column<A, 3, kTokens>(w, range, v, tokens);
    if (vectors - v == 2) score_column<A, 2, kTokens>(w, range, v, tokens);
    if (vectors - v == 1) score_column<A, 1, 8>(w, range, v, tokens);
  });
}

template <typename A, int kRows, int kVectors, typename W>
__attribute__((noinline)) void accumulate_tile(const W& w, int32_t row, int64_t column, int32_t value_rows) {
  float* const target = w.accumulator + row * kAccumulatorStride + column;
  Float sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sums[r][v] = load(target + r * kAccumulatorStride + v * kLanes);
  }
  const typename A::Unit* weights = w.probabilities + row;
  for (int32_t i = 0; i < value_rows; ++i, weights += w.stride) {
    typename A::Lanes values[kVectors];
    for (int v = 0; v < kVectors; ++v) values[v] = A::load(w.values[i] + column + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const typename A::Lanes weight = A::broadcast_unit(weights + r);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = A::multiply_add(sums[r][v], weight, values[v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store(target + r * kAccumulatorStride + v * kLanes, sums[r][v]);
  }
}

// Adds the weighted values of one block to rows [begin, end) of the accumulator.
template <typename A, typename W>
inline void accumulate_block(const W& w, int32_t begin, int32_t end, int32_t value_rows) {
  constexpr int kRows = 6, kVectors = kLanes == 16 ? 4 : 2;
  for (int64_t column = 0; column < kLatent; column += kVectors * kLanes) {
    int32_t row = begin;
    for (; row + kRows <= end; row += kRows) accumulate_tile<A, kRows, kVectors>(w, row, column, value_rows);
    switch (end - row) {
      case 5: accumulate_tile<A, 5, kVectors>(w, row, column, value_rows); break;
      case 4: accumulate_tile<A, 4, kVectors>(w, row, column, value_rows); break;
      case 3: accumulate_tile<A, 3, kVectors>(w, row, column, value_rows); break;
      case 2: accumulate_tile<A, 2, kVectors>(w, row, column, value_rows); break;
      case 1: accumulate_tile<A, 1, kVectors>(w, row, column, value_rows); break;
      default: break;
    }
  }
}

// ---- The softmax.

// The products take whole groups of 32 tokens; those past the last are 0.
MLA_INLINE int32_t taken_tokens(int32_t count) { return (count + 31) / 32 * 32; }

// Scales one vector of rows in place, masks what they do not see, and turns scores into probabilities.
template <bool kMasked, typename W>
MLA_INLINE void softmax_rows(const W& w, const BlockTokens& block, float scale, int64_t row) {
  const Float minus_infinity = broadcast(-__builtin_inff());
  const Int limit = load_bits<Int>(w.row_limit + row);
  float* const scores = w.scores + row;
  const Float old_max = load(w.row_max + row);
  Float new_max = old_max;
  for (int32_t t = 0; t < block.count; ++t) {
    Float s = load(scores + t * w.stride) * scale;
    if (kMasked) {
      const int32_t position = block.address[t] == nullptr ? INT32_MAX : block.first + t;
      s = broadcast(position) < limit ? s : minus_infinity;
    }
    store(scores + t * w.stride, s);
    new_max = max_of(new_max, s);
  }
  // A row that has seen nothing yet keeps -inf; subtracting 0 instead makes its probabilities 0, not NaN.
  const Float subtracted = new_max == minus_infinity ? Float{} : new_max;
  Float sum = {};
  for (int32_t t = 0; t < block.count; ++t) {
    const Float p = exp2_of(load(scores + t * w.stride) - subtracted);
    store(scores + t * w.stride, p);
    sum += p;
  }
  for (int32_t t = block.count; t < taken_tokens(block.count); ++t) store(scores + t * w.stride, Float{});
  const Float factor = exp2_of(old_max - subtracted);
  store(w.row_max + row, new_max);
  store(w.row_sum + row, load(w.row_sum + row) * factor + sum);
  store(w.row_factor + row, factor);
}

template <typename W>
inline void rescale(const W& w, int32_t rows) {
  for (int32_t row = 0; row < rows; ++row) {
    const float factor = w.row_factor[row];
    if (factor == 1.0f) continue;
    float* const target = w.accumulator + row * kAccumulatorStride;
    for (int64_t i = 0; i < kLatent; i += kLanes) store(target + i, load(target + i) * factor);
  }
}

// ---- One item.

template <typename W>
inline void reset(const AttentionItem& item, W& w) {
  for (int64_t row = 0; row < w.rows; ++row) {
    int64_t limit = 0;
    if (row < item.rows) limit = item.first_limit + (item.first_row + row) / item.heads;
    w.row_limit[row] = limit < 0 ? 0 : limit > item.kv_end ? item.kv_end : static_cast<int32_t>(limit);
    w.row_max[row] = -__builtin_inff();
    w.row_sum[row] = 0;
  }
  w.next_token_bytes = token_bytes_of(item);
  w.next_unit_bytes = (w.next_token_bytes + W::kUnits - 1) / W::kUnits;
  if (!item.ds_mla || w.kPackedElements == 1) w.key_scales = nullptr;
  memset(w.accumulator, 0, w.rows * kAccumulatorStride * sizeof(float));
  memset(w.zeros, 0, W::kUnits * sizeof(*w.zeros));
}

template <typename W>
inline void finish(const AttentionItem& item, const W& w) {
  for (int32_t row = 0; row < item.rows; ++row) {
    const bool empty = w.row_max[row] == -__builtin_inff() && w.row_sum[row] == 0;
    constexpr float kLog2 = 0.693147180559945f;
    item.lse[row] = empty ? -__builtin_inff() : w.row_max[row] * kLog2 + __builtin_logf(w.row_sum[row]);
    float denominator = w.row_sum[row];
    if (item.sink != nullptr) denominator += __builtin_expf(item.sink[row] - w.row_max[row] * kLog2);
    const Float scale = broadcast(empty ? 0.0f : item.value_scale / denominator);
    const float* const source = w.accumulator + row * kAccumulatorStride;
    with_dtype(item.out_dtype, [&](auto type) {
      constexpr DType kType = decltype(type)::kValue;
      char* const target = static_cast<char*>(item.out) + row * kLatent * bytes_of(kType);
      for (int64_t i = 0; i < kLatent; i += kLanes) {
        store_from_float<kType>(target + i * bytes_of(kType), load(source + i) * scale);
      }
    });
  }
}

// Rows [begin, end) of one query token, from `begin` on: they see the same tokens.
inline int32_t same_limit_end(const int32_t* row_limit, int32_t begin, int32_t rows) {
  int32_t end = begin + 1;
  while (end < rows && row_limit[end] == row_limit[begin]) ++end;
  return end;
}

template <typename A>
inline void attend(const AttentionItem& item, void* scratch) {
  using W = Workspace<typename A::Unit, A::kPack>;
  W w;
  w.carve(scratch, item.rows);
  reset(item, w);
  A::pack_queries(item, w);

  const int32_t rows = item.rows;
  const int32_t vectors = (rows + kLanes - 1) / kLanes;
  // Limits ascend with the query, so the last row sees most and the first one least.
  const int32_t end = w.row_limit[rows - 1], common_end = w.row_limit[0];
  BlockTokens blocks[2];
  locate(item, item.kv_begin, block_tokens(item.kv_begin, common_end), end, blocks[0]);
  int index = 0;
  for (int64_t first = item.kv_begin, next; first < end; first = next, index ^= 1) {
    const BlockTokens& block = blocks[index];
    next = first + block_tokens(first, common_end);
    locate(item, next, block_tokens(next, common_end), end, blocks[index ^ 1]);
    w.next = next < end ? blocks[index ^ 1].address : nullptr;
    A::stage(item, block, w);
    A::scores(w, vectors, block.count);

    const bool same = first + block.count <= common_end;
    for (int32_t v = 0; v < vectors; ++v) {
      if (same && block.whole) {
        softmax_rows<false>(w, block, item.score_scale, v * kLanes);
      } else {
        softmax_rows<true>(w, block, item.score_scale, v * kLanes);
      }
    }
    A::pack_probabilities(w, vectors, block.count);
    rescale(w, rows);

    if (same) {
      A::accumulate(w, rows, block.count);
      continue;
    }
    // A token hidden from some rows may hold NaN, and 0 * NaN is NaN: each query's rows take only what they see.
    for (int32_t begin = 0; begin < rows;) {
      const int32_t group_end = same_limit_end(w.row_limit, begin, rows);
      const int32_t visible = smaller(block.count, w.row_limit[begin] - block.first);
      if (visible > 0) A::accumulate_first(w, begin, group_end, visible);
      begin = group_end;
    }
  }
  finish(item, w);
}

}  // namespace mla::MLA_ISA
