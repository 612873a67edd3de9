// The end of a tile.
#pragma once

#include "kernels/prefill/rows.cuh"
#include "kernels/prefill/sm90/format.cuh"

namespace mla::sm90_prefill {

using prefill_rows::Output;
using prefill_rows::Rows;

// `row`: of the tile, this lane's upper one. `unusable`: a row that sees this key is NaN.
template <class Format>
__device__ __forceinline__ void finish_tile(const PrefillParams& p, const Tile& tile, int32_t unusable, int row,
                                            const Rows& rows, const Output& out) {
  Rows unshifted = rows;
  float value_scale = 1;
  if constexpr (Format::kFp8Values) {
    for (float& reference : unshifted.reference) reference -= Format::kWeightShift;
    if (p.v_scale != nullptr) value_scale = *p.v_scale;
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int tile_row = row + 8 * e;
    const int32_t query = tile.first_query + tile_row;
    prefill_rows::finish_row<typename Format::Result>(p, int64_t{query} * p.heads + tile.head,
                                                      tile_row<tile.rows, visible_end(tile, p.causal, query)> unusable,
                                                      e, unshifted, out, value_scale);
  }
}

}  // namespace mla::sm90_prefill
