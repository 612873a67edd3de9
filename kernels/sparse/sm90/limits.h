// What the Hopper sparse kernels take, in one place for the capability table and for the choice of the kernel at
// launch.
#pragma once

#include <algorithm>
#include <iterator>

#include "kernels/params.h"

namespace mla::sparse_sm90 {

inline constexpr int32_t kTileSizes[] = {8, 16, 24, 32, 40, 48, 64};
// 48 heads of fp8_ds_mla, whose scores need more registers, run in a tile of 64.
inline constexpr int32_t kDsMlaTileSizes[] = {8, 16, 24, 32, 40, 64};

inline bool takes(const SparseDecodeParams& p) {
  const auto has = [&](const auto& sizes) {
    return std::find(std::begin(sizes), std::end(sizes), p.tile_rows) != std::end(sizes);
  };
  if (p.ds_mla) return p.q_dtype == DType::kBF16 && has(kDsMlaTileSizes);
  const bool float_queries = p.q_dtype == DType::kBF16 || p.q_dtype == DType::kF16;
  const bool fp8 = p.cache_dtype == DType::kE4M3FN && (float_queries || p.q_dtype == DType::kE4M3FN);
  return has(kTileSizes) && (fp8 || (float_queries && p.cache_dtype == p.q_dtype));
}

}  // namespace mla::sparse_sm90
