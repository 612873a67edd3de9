// Head counts of decode on AMD: what the planner takes and what the reduction takes, apart. A count is native where
// both have it; the wrapper pads others to the next one.
#pragma once

#include <vector>

#include "kernels/capability.h"

namespace mla::gfx9 {

inline std::vector<Range> planner_heads() { return {{16, 128, 16}, {24, 24, 1}, {144, 4096, 16}}; }

// JAX_MLA_ROCM_REDUCE_24=OFF leaves 24 out: such a build pads 24 heads to 32.
inline std::vector<Range> reducer_heads() {
#if defined(JAX_MLA_ROCM_WITHOUT_REDUCE_24)
  return {{16, 128, 16}, {144, 4096, 16}};
#else
  return planner_heads();
#endif
}

inline bool contains(const std::vector<Range>& ranges, int32_t heads) {
  for (const Range& range : ranges) {
    if (mla::contains(range, heads)) return true;
  }
  return false;
}

}  // namespace mla::gfx9
