// Head counts of decode on AMD: what the planner takes and what the reduction takes, apart. A count is native where
// both have it; the wrapper pads others to the next one.
#pragma once

#include <vector>

#include "kernels/capability.h"

namespace mla::gfx9 {

std::vector<Range> planner_heads();
std::vector<Range> reducer_heads();

inline bool contains(const std::vector<Range>& ranges, int32_t heads) {
  for (const Range& range : ranges) {
    if (mla::contains(range, heads)) return true;
  }
  return false;
}

}  // namespace mla::gfx9
