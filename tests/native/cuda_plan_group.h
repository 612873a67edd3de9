// The driver's group for plan_decode: the device's plans against a serial planner over the same rule, bit for bit.
#pragma once

#include "tests/native/cuda_decode_case.h"

namespace mla::test {

struct HostPlan {
  std::vector<WorkItem> items;
  std::vector<int32_t> part_offsets;
  std::vector<TileSplits> tile_splits;
};

inline HostPlan plan_on_host(const PlanDecodeParams& p) {
  const int32_t tiles = p.batch * p.plan.row_tiles;
  HostPlan plan;
  plan.items.assign(p.plan.max_items, WorkItem{});
  plan.part_offsets.assign(p.plan.parts + 1, 0);
  int64_t total = 0, start = 0;
  for (int32_t tile = 0; tile < tiles; ++tile) total += tile_cost(p, tile).cost;
  const int64_t length = part_length(p, total);
  int32_t items = 0, partials = 0;
  for (int32_t tile = 0; tile < tiles; ++tile) {
    const TileCost cost = tile_cost(p, tile);
    const TileCut cut = cut_tile(p, cost, start, length);
    plan.tile_splits.push_back({cut.count >= 2 ? partials : -1, cut.count});
    const int32_t request = tile / p.plan.row_tiles;
    for (int32_t i = 0; i < cut.count; ++i) {
      const Piece piece = cut_piece(p, cost, cut, i, start, length);
      const int64_t end = std::min<int64_t>(int64_t{piece.block_end} * kBlockTokens, p.kv_lens[request]);
      require(items < p.plan.max_items, "the host's plan has too many items");
      require(piece.part >= 0 && piece.part < p.plan.parts, "the host's plan has an item outside its parts");
      plan.items[items++] = {request,
                             tile % p.plan.row_tiles,
                             piece.block_begin * kBlockTokens,
                             static_cast<int32_t>(end),
                             cut.count >= 2 ? partials + i : -1,
                             {0, 0, 0}};
      for (int32_t part = piece.part + 1; part <= p.plan.parts; ++part) ++plan.part_offsets[part];
    }
    if (cut.count >= 2) partials += cut.count;
    start += cost.cost;
  }
  require(partials <= max_partials(tiles, p.plan.parts, p.batch_invariant), "the host's plan has too many partials");
  return plan;
}

inline void check_plan(Random& random, int32_t batch, int64_t longest, bool ragged, bool batch_invariant) {
  PlanDecodeParams p{};
  p.batch = batch;
  p.heads = pick(random, 1, 128);
  p.max_q_len = pick(random, 1, 4);
  p.overhead_blocks = pick(random, 0, 6);
  p.min_part_blocks = pick(random, 0, 4);
  p.batch_invariant = batch_invariant;
  const Variant& variant = decode_variants()[pick(random, 0, decode_variants().size() - 1)];
  const int32_t tile_rows = choose_tile_rows(variant, int64_t{p.heads} * p.max_q_len);
  const int32_t row_tiles = ceil_div(p.heads * p.max_q_len, tile_rows);
  std::vector<int32_t> kv_lens(batch), cu_q_lens(batch + 1, 0);
  for (int32_t b = 0; b < batch; ++b) {
    kv_lens[b] = pick(random, 0, 4) == 0 ? pick(random, -2, 0) : pick(random, 1, longest);
    cu_q_lens[b + 1] = cu_q_lens[b] + pick(random, 0, p.max_q_len);
  }
  PlanArrays arrays(batch, row_tiles, tile_rows, pick(random, 1, 300), batch_invariant);
  const Array<int32_t> device_kv_lens(kv_lens), device_cu_q_lens(cu_q_lens);
  p.plan = arrays.plan;
  p.kv_lens = device_kv_lens.data();
  p.cu_q_lens = ragged ? device_cu_q_lens.data() : nullptr;
  check(plan_decode(p, device()));
  const auto items = arrays.items.download();
  const auto part_offsets = arrays.part_offsets.download();
  const auto tile_splits = arrays.tile_splits.download();
  p.kv_lens = kv_lens.data();
  p.cu_q_lens = ragged ? cu_q_lens.data() : nullptr;
  const HostPlan expected = plan_on_host(p);
  const std::string where = "plan_decode, batch " + std::to_string(batch) + ", heads " + std::to_string(p.heads) +
                            ", q " + std::to_string(p.max_q_len) + ", parts " + std::to_string(p.plan.parts);
  require(same_bits(tile_splits, expected.tile_splits), where + ": tile_splits");
  require(same_bits(part_offsets, expected.part_offsets), where + ": part_offsets");
  require(same_bits(items, expected.items), where + ": items");
}

inline std::string plan_group(bool quick) {
  Random random(7);
  int count = 0;
  for (bool batch_invariant : {false, true}) {
    for (bool ragged : {false, true}) {
      for (int32_t batch : {1, 2, 3, 31, 128, 1024}) {
        if (quick && batch > 31) continue;
        for (int64_t longest : {int64_t{100}, int64_t{9000}, int64_t{0x7FFFFFFF}}) {
          check_plan(random, batch, longest, ragged, batch_invariant);
          ++count;
        }
      }
    }
    if (quick) continue;
    check_plan(random, 100000, 5000, true, batch_invariant);
    ++count;
  }
  return std::to_string(count) + " plans";
}

}  // namespace mla::test
