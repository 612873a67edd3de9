// What the Hopper kernel takes, in one place for the capability table and for the choice of the kernel at launch.
#pragma once

#include "kernels/capability.h"
#include "kernels/params.h"

namespace mla::sm90 {

inline constexpr int32_t kTileSizes[] = {8, 16, 24, 32, 40, 48, 64};
// 16 and 32 divide a block of 64 tokens, and of larger pages it is a part.
inline constexpr Range kPageSizes[] = {{16, 16, 1}, {32, 32, 1}, {64, 1 << 20, 64}};

inline bool takes(const DecodeParams& p) {
  bool rows = false, page_size = false;
  for (int32_t n : kTileSizes) rows = rows || n == p.plan.tile_rows;
  for (const Range& range : kPageSizes) page_size = page_size || contains(range, p.page_size);
  return rows && page_size && (p.q_dtype == DType::kBF16 || p.q_dtype == DType::kF16) && p.cache_dtype == p.q_dtype;
}

}  // namespace mla::sm90
