// What the Hopper kernel for fp8 caches takes, in one place for the capability table and for the choice of the kernel
// at launch.
#pragma once

#include "kernels/capability.h"
#include "kernels/params.h"

namespace mla::sm90::fp8 {

inline constexpr int32_t kTileSizes[] = {8, 16, 24, 32, 40, 48, 64};
inline constexpr Range kPageSizes[] = {{8, 1 << 20, 8}};  // copies are of eight tokens

inline bool takes(const DecodeParams& p) {
  bool rows = false, page_size = false;
  for (int32_t n : kTileSizes) rows = rows || n == p.plan.tile_rows;
  for (const Range& range : kPageSizes) page_size = page_size || contains(range, p.page_size);
  const bool queries = p.q_dtype == DType::kBF16 || p.q_dtype == DType::kF16 || p.q_dtype == DType::kE4M3FN;
  return rows && page_size && queries && p.cache_dtype == DType::kE4M3FN && !p.ds_mla;
}

}  // namespace mla::sm90::fp8
