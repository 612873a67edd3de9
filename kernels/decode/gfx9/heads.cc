#include "kernels/decode/gfx9/heads.h"

namespace mla::gfx9 {

std::vector<Range> planner_heads() { return {{16, 128, 16}, {24, 24, 1}, {144, 4096, 16}}; }

// JAX_MLA_ROCM_REDUCE_24=OFF leaves 24 out: such a build pads 24 heads to 32.
std::vector<Range> reducer_heads() {
#if defined(JAX_MLA_ROCM_WITHOUT_REDUCE_24)
  return {{16, 128, 16}, {144, 4096, 16}};
#else
  return planner_heads();
#endif
}

}  // namespace mla::gfx9
