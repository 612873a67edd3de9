// Partial results of one row, and how they become the row.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace mla::cpu {

// Normalised outputs over disjoint sets of keys, `stride` rows from one to the next, in the order of their keys.
struct Partials {
  const float* out;  // [L], the first one's
  const float* lse;  // natural log; -inf: saw no key, and its out is not read
  int64_t stride;
  int32_t count;
};

struct OutputRow {
  void* out;  // [L] in dtype
  float* lse;
  DType dtype;
};

void write_empty(const OutputRow& row);

// `sink`: a natural-log logit that joins the denominator and not lse; null: none.
void merge_partials(const Partials& partials, const float* sink, const OutputRow& row);

}  // namespace mla::cpu
