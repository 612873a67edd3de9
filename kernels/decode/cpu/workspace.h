// Scratch of one attention item, carved out of one allocation.
#pragma once

#include "kernels/cpu/vector.h"

namespace mla::MLA_ISA {

// Added to the length of rows that are walked down a column: rows a power of two apart share few sets of a cache.
constexpr int64_t kSkew = 16;
constexpr int64_t kAccumulatorStride = kLatent + kSkew;

// Tokens worked on at once, a multiple of kBlockTokens: more of them load and store the accumulator less often.
#ifndef MLA_WORK_TOKENS
#define MLA_WORK_TOKENS 64
#endif
constexpr int32_t kWorkTokens = MLA_WORK_TOKENS;
static_assert(kWorkTokens % kBlockTokens == 0, "a block of the plan is the smallest piece of work");

// A Unit is what one lane multiplies at a time: kPack elements, 32 bits together.
template <typename Unit, int kPack>
struct Workspace {
  static constexpr int kPackedElements = kPack;
  static constexpr int64_t kUnits = kWidth / kPack;           // of a token
  static constexpr int64_t kValueRows = kWorkTokens / kPack;  // of a block's values

  int64_t rows;                    // rounded up to whole vectors and tiles
  int64_t stride;                  // rows, skewed
  Unit* queries;                   // [kUnits][stride]
  float* scores;                   // [kWorkTokens][stride]; then the probabilities
  Unit* probabilities;             // [kValueRows][stride], packed along tokens
  float* accumulator;              // [rows][kAccumulatorStride]
  float* row_max;                  // [rows], in exponents of 2
  float* row_sum;                  // [rows]
  float* row_factor;               // [rows]: what the accumulator shrinks by in this block
  int32_t* row_limit;              // [rows]: a row sees tokens below it
  Unit* staged;                    // [kWorkTokens][kUnits]: tokens converted or made contiguous
  Unit* value_rows;                // [kValueRows + 1][kAccumulatorStride]: packed along tokens; the last row is a spare
  Unit* zeros;                     // [kUnits]: stands for a token that may not be read
  const Unit* keys[kWorkTokens];   // each token's row
  const Unit* values[kValueRows];  // each row of values
  float* key_scales;               // [kLatent / kDsMlaGroup][kWorkTokens]: of the keys, group by group; null: 1
  const char* const* next;         // [kWorkTokens]: the next block's tokens, to prefetch; null after the last
  int64_t next_unit_bytes;         // of the cache, for each unit here, rounded up
  int64_t next_token_bytes;

  // With memory null only measures.
  int64_t carve(void* memory, int32_t item_rows) {
    int64_t used = 0;
    const auto take = [&](auto*& pointer, int64_t count) {
      pointer = reinterpret_cast<decltype(+pointer)>(reinterpret_cast<uintptr_t>(memory) + used);
      used += (count * 4 + 63) / 64 * 64;
    };
    rows = (item_rows + 15) / 16 * 16;
    stride = rows + kSkew;
    take(queries, kUnits * stride);
    take(scores, kWorkTokens * stride);
    take(probabilities, kPack == 1 ? 0 : kValueRows * stride);
    if (kPack == 1) probabilities = reinterpret_cast<Unit*>(scores);
    take(accumulator, rows * kAccumulatorStride);
    take(row_max, rows);
    take(row_sum, rows);
    take(row_factor, rows);
    take(row_limit, rows);
    take(staged, kWorkTokens * kUnits);
    take(value_rows, kPack == 1 ? 0 : (kValueRows + 1) * kAccumulatorStride);
    take(zeros, kUnits);
    take(key_scales, kPack == 1 ? 0 : kLatent / kDsMlaGroup * kWorkTokens);
    return used;
  }
};

}  // namespace mla::MLA_ISA
