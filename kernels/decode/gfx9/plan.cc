#include "kernels/decode/plan_rule.h"
#include "kernels/rocm/launch.h"

namespace mla {
namespace {

// Of kernels/decode/make_plan.h, on waves of 64 lanes.
constexpr int kMinThreads = 64 * kEvenTrials, kMaxThreads = 1024;
constexpr int kItemsABlock = 1024;  // that a block writes
constexpr int kMaxBlocks = 32;

}  // namespace

Error plan_decode(const PlanDecodeParams& params, const Device& device) {
  const DecodePlan& plan = params.plan;
  if (plan.parts < 1 || plan.row_tiles < 1 || plan.tile_rows < 1) {
    return "jax_mla: plan_decode has " + std::to_string(plan.parts) + " parts, " + std::to_string(plan.row_tiles) +
           " row tiles and " + std::to_string(plan.tile_rows) + " rows a tile; each must be positive";
  }
  LaunchShape shape;
  shape.block.x = kMinThreads;
  while (shape.block.x < kMaxThreads && shape.block.x < int64_t{params.batch} * plan.row_tiles) shape.block.x *= 2;
  shape.grid.x = min_of(ceil_div(max_of(plan.max_items, 1), kItemsABlock), kMaxBlocks);
  shape.lds_bytes = plan_shared_bytes(plan, static_cast<int32_t>(shape.block.x));
  return launch({"decode/gfx9/plan", "mla_plan_decode"}, shape, device, params);
}

}  // namespace mla
