// A serial planner over the rule of plan_rule.h: what a device's plans are compared with, bit for bit.
#pragma once

#include <string>
#include <vector>

#include "kernels/decode/plan_rule.h"

namespace mla::test {

struct HostPlan {
  std::string wrong;  // with the rule itself; empty: nothing
  std::vector<WorkItem> items;
  std::vector<int32_t> part_offsets;
  std::vector<TileSplits> tile_splits;
};

inline SplitRule rule_on_host(const PlanDecodeParams& p) {
  BatchWork work = BatchWork::none();
  for (int32_t b = 0; b < p.batch; ++b) work.add(request_work(p, b, most_blocks(p)));
  SplitRule rule = split_rule(p, work);
  if (!even_trials(rule)) return rule;
  for (int32_t trial = 0; trial < kEvenTrials; ++trial) {
    const int32_t capacity = even_capacity(rule, trial);
    int64_t pieces = 0;
    for (int32_t b = 0; b < p.batch; ++b) pieces += even_pieces(rule, request_work(p, b, most_blocks(p)), capacity);
    if (pieces > rule.groups) continue;
    cut_evenly(rule, capacity);
    break;
  }
  return rule;
}

inline HostPlan plan_on_host(const PlanDecodeParams& p, const SplitRule& rule) {
  const int64_t tiles = int64_t{p.batch} * p.plan.row_tiles;
  HostPlan plan;
  plan.tile_splits.assign(tiles, {-1, 0});
  std::vector<std::vector<WorkItem>> parts(p.plan.parts);
  int32_t start = 0, index = 0, partials = 0;
  for (int32_t unit = 0; unit < rule.units; ++unit) {
    const int32_t request = rule.by_request ? unit : unit / p.plan.row_tiles;
    const int32_t blocks = unit_blocks(p, rule, unit);
    const UnitCut cut = cut_unit(p, rule, blocks, start);
    for (int32_t tile = 0; tile < rule.width && cut.count > 0; ++tile) {
      const int32_t row_tile = rule.by_request ? tile : unit % p.plan.row_tiles;
      plan.tile_splits[request * p.plan.row_tiles + row_tile] = {cut.count >= 2 ? partials : -1, cut.count};
      for (int32_t i = 0; i < cut.count; ++i) {
        const int32_t group = piece_group(rule, cut, i, index + i);
        if (group < 0 || group >= rule.groups) {
          plan.wrong = "the host's plan has an item outside its parts";
          return plan;
        }
        parts[group * rule.width + tile].push_back({request,
                                                    row_tile,
                                                    piece_begin(rule, cut, i, blocks) * kBlockTokens,
                                                    piece_end(rule, cut, i, blocks, p.kv_lens[request]),
                                                    cut.count >= 2 ? partials + i : -1,
                                                    {0, 0, 0}});
      }
      if (cut.count >= 2) partials += cut.count;
    }
    index += cut.count;
    start += unit_cost(p, blocks);
  }
  plan.part_offsets.push_back(0);
  for (const std::vector<WorkItem>& part : parts) {
    plan.items.insert(plan.items.end(), part.begin(), part.end());
    plan.part_offsets.push_back(static_cast<int32_t>(plan.items.size()));
  }
  if (static_cast<int32_t>(plan.items.size()) > p.plan.max_items) plan.wrong = "the host's plan has too many items";
  if (partials > max_partials(tiles, p.plan.parts, p.batch_invariant)) {
    plan.wrong = "the host's plan has too many partials";
  }
  plan.items.resize(p.plan.max_items, WorkItem{});
  return plan;
}

}  // namespace mla::test
