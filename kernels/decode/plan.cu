// plan_decode on CUDA.
#include "kernels/cuda/launch.h"
#include "kernels/decode/make_plan.h"

namespace mla {
namespace {

constexpr int kItemsACta = 1024;  // that a CTA writes
constexpr int kMaxCtas = 32;

__global__ void __launch_bounds__(kPlanMaxThreads) plan_kernel(const __grid_constant__ PlanDecodeParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  make_plan(p, shared);
}

}  // namespace

Error plan_decode(const PlanDecodeParams& params, const Device& device) {
  const DecodePlan& plan = params.plan;
  if (plan.parts < 1 || plan.row_tiles < 1 || plan.tile_rows < 1) {
    return "jax_mla: plan_decode has " + std::to_string(plan.parts) + " parts, " + std::to_string(plan.row_tiles) +
           " row tiles and " + std::to_string(plan.tile_rows) + " rows a tile; each must be positive";
  }
  int threads = kPlanMinThreads;
  while (threads < kPlanMaxThreads && threads < int64_t{params.batch} * plan.row_tiles) threads *= 2;
  LaunchShape shape;
  shape.grid = dim3(min_of(ceil_div(max_of(plan.max_items, 1), kItemsACta), kMaxCtas));
  shape.block = dim3(threads);
  shape.shared_bytes = plan_shared_bytes(plan, threads);
  return launch("plan_decode", plan_kernel, shape, device, params);
}

}  // namespace mla
