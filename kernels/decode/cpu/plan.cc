// The work split of plan_rule.h, unit after unit: their pieces come in the order of the groups.
#include <algorithm>
#include <vector>

#include "kernels/decode/plan_rule.h"
#include "kernels/entry.h"

namespace mla {
namespace {

SplitRule rule_of(const PlanDecodeParams& p) {
  const int32_t longest = most_blocks(p);
  BatchWork work = BatchWork::none();
  for (int32_t request = 0; request < p.batch; ++request) work.add(request_work(p, request, longest));
  SplitRule rule = split_rule(p, work);
  for (int32_t trial = 0; even_trials(rule) && trial < kEvenTrials; ++trial) {
    const int32_t capacity = even_capacity(rule, trial);
    int64_t pieces = 0;
    for (int32_t request = 0; request < p.batch; ++request) {
      pieces += even_pieces(rule, request_work(p, request, longest), capacity);
    }
    if (pieces <= rule.groups) cut_evenly(rule, capacity);
  }
  return rule;
}

struct UnitPiece {
  int32_t group;
  int32_t kv_begin, kv_end;  // tokens
  int32_t unit;
  int32_t number;         // in its unit
  int32_t count;          // of its unit
  int32_t first_partial;  // of its unit's first tile
};

// Writes tile_splits on the way.
std::vector<UnitPiece> cut_units(const PlanDecodeParams& p, const SplitRule& rule) {
  std::vector<UnitPiece> pieces;
  int32_t partials = 0;
  int32_t start = 0;
  for (int32_t unit = 0; unit < rule.units; ++unit) {
    const int32_t blocks = unit_blocks(p, rule, unit);
    const UnitCut cut = cut_unit(p, rule, blocks, start);
    const int32_t request = rule.by_request ? unit : unit / p.plan.row_tiles;
    start += unit_cost(p, blocks);
    for (int32_t i = 0; i < cut.count; ++i) {
      const auto index = static_cast<int32_t>(pieces.size());
      pieces.push_back({piece_group(rule, cut, i, index), piece_begin(rule, cut, i, blocks) * kBlockTokens,
                        piece_end(rule, cut, i, blocks, p.kv_lens[request]), unit, i, cut.count, partials});
    }
    const int32_t tiles = rule.by_request ? p.plan.row_tiles : 1;
    for (int32_t tile = 0; tile < tiles; ++tile) {
      const int32_t count = tile < rule.width ? cut.count : 0;
      p.plan.tile_splits[int64_t{unit} * tiles + tile] = {count > 1 ? partials : -1, count};
      if (count > 1) partials += count;
    }
  }
  return pieces;
}

}  // namespace

Error plan_decode(const PlanDecodeParams& p, const Device&) {
  const DecodePlan& plan = p.plan;
  const SplitRule rule = rule_of(p);
  const std::vector<UnitPiece> pieces = cut_units(p, rule);
  int32_t items = 0;
  auto first = pieces.begin();
  for (int32_t group = 0; group < rule.groups; ++group) {
    const auto last = std::find_if(first, pieces.end(), [&](const UnitPiece& x) { return x.group != group; });
    for (int32_t tile = 0; tile < rule.width; ++tile) {
      plan.part_offsets[group * rule.width + tile] = items;
      for (auto it = first; it != last && items < plan.max_items; ++it) {
        const int32_t request = rule.by_request ? it->unit : it->unit / plan.row_tiles;
        WorkItem item = {};
        item.request = request;
        item.row_tile = rule.by_request ? tile : it->unit % plan.row_tiles;
        item.kv_begin = it->kv_begin;
        item.kv_end = it->kv_end;
        item.partial = it->count > 1 ? it->first_partial + tile * it->count + it->number : -1;
        plan.items[items++] = item;
      }
    }
    first = last;
  }
  for (int32_t part = rule.groups * rule.width; part <= plan.parts; ++part) plan.part_offsets[part] = items;
  std::fill(plan.items + items, plan.items + plan.max_items, WorkItem{});
  return {};
}

}  // namespace mla
