// The work split of plan_rule.h, tile after tile: tiles in order give items sorted by part.
#include <algorithm>

#include "kernels/decode/plan_rule.h"
#include "kernels/entry.h"

namespace mla {

Error plan_decode(const PlanDecodeParams& p, const Device&) {
  const DecodePlan& plan = p.plan;
  const int32_t tiles = p.batch * plan.row_tiles;
  int64_t total_cost = 0;
  for (int32_t tile = 0; tile < tiles; ++tile) total_cost += tile_cost(p, tile).cost;
  const int64_t length = part_length(p, total_cost);

  int32_t items = 0, partials = 0, next_part = 0;
  int64_t start = 0;
  for (int32_t tile = 0; tile < tiles; ++tile) {
    const TileCost cost = tile_cost(p, tile);
    const TileCut cut = cut_tile(p, cost, start, length);
    const int32_t request = tile / plan.row_tiles;
    const int64_t kv_len = p.kv_lens[request];
    for (int32_t i = 0; i < cut.count && items < plan.max_items; ++i) {
      const Piece piece = cut_piece(p, cost, cut, i, start, length);
      for (; next_part <= std::min(piece.part, plan.parts); ++next_part) plan.part_offsets[next_part] = items;
      WorkItem item = {};
      item.request = request;
      item.row_tile = tile % plan.row_tiles;
      item.kv_begin = piece.block_begin * kBlockTokens;
      item.kv_end = static_cast<int32_t>(std::min(int64_t{piece.block_end} * kBlockTokens, kv_len));
      item.partial = cut.count > 1 ? partials + i : -1;
      plan.items[items++] = item;
    }
    plan.tile_splits[tile] = {cut.count > 1 ? partials : -1, cut.count};
    if (cut.count > 1) partials += cut.count;
    start += cost.cost;
  }
  for (; next_part <= plan.parts; ++next_part) plan.part_offsets[next_part] = items;
  std::fill(plan.items + items, plan.items + plan.max_items, WorkItem{});
  return {};
}

}  // namespace mla
