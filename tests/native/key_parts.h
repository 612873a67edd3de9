// The keys of a prefill problem in parts: nope parts, or an up-projection, beside the rope keys of all heads.
#pragma once

#include "kernels/params.h"
#include "tests/native/support.h"

namespace mla::test {

// Head 0's rope keys become those of all heads. `k`: [stored, heads, 192].
inline void share_rope(Array& k, int64_t stored, int64_t heads) {
  for (int64_t row = 0; row < stored * heads; ++row) {
    const int64_t first = row / heads * heads;
    for (int c = kNope; c < kHeadDim; ++c) k.set_code(row * kHeadDim + c, k.code(first * kHeadDim + c));
  }
}

// The same keys in rows of `nope_width` and of `rope_width`, whose last columns are the rope key.
inline void part_keys(const Array& k, int64_t stored, int64_t heads, Array& nope, int64_t nope_width, Array& k_pe,
                      int64_t rope_width) {
  for (int64_t row = 0; row < stored * heads; ++row) {
    for (int c = 0; c < kNope; ++c) nope.set_code(row * nope_width + c, k.code(row * kHeadDim + c));
    const int64_t rope = (row / heads + 1) * rope_width - kHeadDim;
    for (int c = kNope; c < kHeadDim; ++c) k_pe.set_code(rope + c, k.code(row * kHeadDim + c));
  }
}

}  // namespace mla::test
