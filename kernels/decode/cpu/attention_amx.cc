// The bf16 arithmetic with both products in AMX tiles. Blocks that some rows see in part go through vdpbf16ps.
#define MLA_ISA amx
#define MLA_LANES 16
#define MLA_WORK_TOKENS 256
#include "kernels/cpu/amx_tiles.h"
#include "kernels/cpu/transpose.h"
#include "kernels/decode/cpu/attention_bf16.h"

namespace mla::amx {
namespace {

// Transposes 16 x 16 units.
void transpose_units(const PairUnit* source, int64_t source_stride, PairUnit* target, int64_t target_stride) {
  Int rows[kLanes];
  for (int i = 0; i < kLanes; ++i) rows[i] = load_bits<Int>(source + i * source_stride);
  transpose(rows);
  for (int i = 0; i < kLanes; ++i) memcpy(target + i * target_stride, &rows[i], sizeof(rows[i]));
}

struct AmxTiles : BFloat16Pairs {
  static constexpr int64_t kTokenBytes = kWidth * 2;
  static constexpr int64_t kUnitBytes = sizeof(Unit);
  static constexpr int64_t kWeightRow = W::kValueRows + kSkew;  // pairs of tokens

  // Asks for the lines of kLines neighbouring tiles: a tile load waits for its sixteen rows one after another.
  template <int kLines>
  static MLA_INLINE void prefetch_rows(const void* first, int64_t stride, int rows = kTileLines) {
    for (int r = 0; r < rows; ++r) {
      for (int line = 0; line < kLines; ++line) {
        _mm_prefetch(static_cast<const char*>(first) + r * stride + line * 64, _MM_HINT_T0);
      }
    }
  }

  // A tile of keys is 16 tokens at one distance from each other: a page's tokens are, others are gathered.
  static void stage(const AttentionItem& item, const BlockTokens& block, W& w) {
    BFloat16Pairs::stage(item, block, w);
    // Both products take 32 tokens at a time.
    const int32_t taken = taken_tokens(block.count);
    for (int32_t first = 0; first < taken; first += kTileLines) {
      bool in_place = true;
      for (int32_t t = first; t < first + kTileLines; ++t)
        in_place &= w.keys[t] == w.keys[first] + (t - first) * W::kUnits;
      if (in_place) continue;
      for (int32_t t = first; t < first + kTileLines; ++t) {
        Unit* const target = w.staged + t * W::kUnits;
        if (w.keys[t] != target) memcpy(target, w.keys[t], kTokenBytes);
        w.keys[t] = target;
      }
    }
    for (int32_t i = (block.count + 1) / 2; i < taken / 2; ++i) {
      memset(w.value_rows + i * kAccumulatorStride, 0, kLatent * kUnitBytes);
    }
  }

  // The sums in tiles 0 to 3, added to the scores.
  template <bool kTwo>
  static void add_tiles(const W& w, const UnitRange& range, int32_t token, int64_t row) {
    constexpr int64_t kTileBytes = kTileUnits * kUnitBytes;
    alignas(64) float sums[1 + kTwo][2 * kTileLines][kTileUnits];
    store_tile<0>(sums[0], kTileBytes);
    store_tile<1>(sums[0][kTileLines], kTileBytes);
    if (kTwo) {
      store_tile<2>(sums[kTwo], kTileBytes);
      store_tile<3>(sums[kTwo][kTileLines], kTileBytes);
    }
    for (int half = 0; half <= static_cast<int>(kTwo); ++half) {
      for (int t = 0; t < 2 * kTileLines; ++t) {
        add_scores(w, range, token + t, row + half * kTileUnits, mla::MLA_ISA::load(sums[half][t]));
      }
    }
  }

  // Tiles 0 to 3: sums of two tiles of tokens by one or two of rows; 4 and 5: keys; 6 and 7: queries.
  template <bool kTwo>
  static void score_tiles(const W& w, const UnitRange& range, int32_t token, int64_t row) {
    const int64_t stride = w.stride * kUnitBytes;
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    const Unit* const keys = w.keys[token];
    const Unit* const more_keys = w.keys[token + kTileLines];
    for (int64_t unit = range.begin; unit < range.end; unit += kTileUnits) {
      const Unit* const queries = w.queries + unit * w.stride + row;
      if (row == 0) prefetch_next<2 * kTileLines>(w, token, unit);
      if (unit + kTileUnits < range.end) prefetch_rows<1 + kTwo>(queries + kTileUnits * w.stride, stride);
      load_tile<4>(keys + unit, kTokenBytes);
      load_tile<6>(queries, stride);
      multiply_tiles<0, 4, 6>();
      load_tile<5>(more_keys + unit, kTokenBytes);
      multiply_tiles<1, 5, 6>();
      if (kTwo) {
        load_tile<7>(queries + kTileUnits, stride);
        multiply_tiles<2, 4, 7>();
        multiply_tiles<3, 5, 7>();
      }
    }
    if (!range.whole) return add_tiles<kTwo>(w, range, token, row);
    float* const scores = w.scores + token * w.stride + row;
    store_tile<0>(scores, stride);
    store_tile<1>(scores + kTileLines * w.stride, stride);
    if (kTwo) {
      store_tile<2>(scores + kTileUnits, stride);
      store_tile<3>(scores + kTileLines * w.stride + kTileUnits, stride);
    }
  }

  static void scores(const W& w, int32_t vectors, int32_t tokens) {
    for_unit_ranges(w, [&](const UnitRange& range) {
      for (int32_t token = 0; token < tokens; token += 2 * kTileLines) {
        int32_t v = 0;
        for (; v + 2 <= vectors; v += 2) score_tiles<true>(w, range, token, v * kTileUnits);
        if (v < vectors) score_tiles<false>(w, range, token, v * kTileUnits);
      }
    });
  }

  // Tiles 0 to 3: sums of one or two tiles of rows by two of columns; 4 and 5: probabilities; 6 and 7: values.
  template <bool kTwo>
  static void accumulate_tiles(const W& w, const Unit* probabilities, int64_t row, int64_t column, int32_t steps) {
    constexpr int64_t kStride = kAccumulatorStride * kUnitBytes;
    constexpr int64_t kWeightStride = kWeightRow * kUnitBytes;
    float* const target = w.accumulator + row * kAccumulatorStride + column;
    float* const more_rows = target + kTileLines * kAccumulatorStride;
    load_tile<0>(target, kStride);
    load_tile<1>(target + kTileUnits, kStride);
    if (kTwo) {
      load_tile<2>(more_rows, kStride);
      load_tile<3>(more_rows + kTileUnits, kStride);
    }
    for (int32_t step = 0; step < steps; ++step) {
      const Unit* const weights = probabilities + step * kTileUnits;
      const Unit* const values = w.value_rows + step * kTileLines * kAccumulatorStride + column;
      if (step + 1 < steps) prefetch_rows<2>(values + kTileLines * kAccumulatorStride, kStride);
      // The sums of the next two tiles of columns, a share at each step.
      prefetch_rows<2>(target + 2 * kTileUnits + step % 8 * 4 * kAccumulatorStride, kStride, 4);
      load_tile<4>(weights, kWeightStride);
      load_tile<6>(values, kStride);
      load_tile<7>(values + kTileUnits, kStride);
      multiply_tiles<0, 4, 6>();
      multiply_tiles<1, 4, 7>();
      if (kTwo) {
        load_tile<5>(weights + kTileLines * kWeightRow, kWeightStride);
        multiply_tiles<2, 5, 6>();
        multiply_tiles<3, 5, 7>();
      }
    }
    store_tile<0>(target, kStride);
    store_tile<1>(target + kTileUnits, kStride);
    if (kTwo) {
      store_tile<2>(more_rows, kStride);
      store_tile<3>(more_rows + kTileUnits, kStride);
    }
  }

  static void accumulate(const W& w, int32_t rows, int32_t tokens) {
    const int32_t steps = taken_tokens(tokens) / 32;
    alignas(64) Unit probabilities[2 * kTileLines * kWeightRow];  // [row][pair of tokens]
    for (int64_t row = 0; row < rows; row += 2 * kTileLines) {
      const bool two = row + kTileLines < rows;
      for (int half = 0; half <= static_cast<int>(two); ++half) {
        for (int32_t step = 0; step < steps; ++step) {
          transpose_units(w.probabilities + step * kTileUnits * w.stride + row + half * kTileLines, w.stride,
                          probabilities + half * kTileLines * kWeightRow + step * kTileUnits, kWeightRow);
        }
      }
      for (int64_t column = 0; column < kLatent; column += 2 * kTileUnits) {
        if (two) {
          accumulate_tiles<true>(w, probabilities, row, column, steps);
        } else {
          accumulate_tiles<false>(w, probabilities, row, column, steps);
        }
      }
    }
  }
};

int64_t scratch_bytes(int32_t rows) { return AmxTiles::W{}.carve(nullptr, rows); }

void run(const AttentionItem& item, void* scratch) {
  configure_tiles();
  attend<AmxTiles>(item, scratch);
  release_tiles();
}

}  // namespace
}  // namespace mla::amx

const mla::cpu::AttentionKernel mla::cpu::kAmxAttention = {mla::amx::scratch_bytes, mla::amx::run};
