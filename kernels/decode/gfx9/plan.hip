// plan_decode on AMD. Short code, since the kernel runs once and for microseconds, and half of the parameters in vector
// registers: the many branches of the rule leave none of the scalar ones.
#include "kernels/decode/make_plan.h"

namespace mla {

MLA_KERNEL __launch_bounds__(kPlanMaxThreads) __attribute__((minsize)) mla_plan_decode(PlanDecodeParams p) {
  extern __shared__ __attribute__((aligned(16))) unsigned char shared[];
  p.heads = in_vector_register(p.heads);
  p.max_q_len = in_vector_register(p.max_q_len);
  p.overhead_blocks = in_vector_register(p.overhead_blocks);
  p.min_part_blocks = in_vector_register(p.min_part_blocks);
  p.few_pieces = in_vector_register(p.few_pieces);
  p.slack = in_vector_register(p.slack);
  p.plan.tile_rows = in_vector_register(p.plan.tile_rows);
  p.plan.row_tiles = in_vector_register(p.plan.row_tiles);
  make_plan(p, shared);
}

}  // namespace mla
