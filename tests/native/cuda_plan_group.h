// The driver's group for plan_decode: the device's plans against a serial planner over the same rule, bit for bit.
#pragma once

#include "tests/native/cuda_decode_case.h"
#include "tests/native/host_plan.h"

namespace mla::test {

// Returns how the batch was cut. `alike`: one length for all requests, and a row tile or several for each.
inline Cut check_plan(Random& random, int32_t batch, int64_t longest, bool ragged, bool alike, bool batch_invariant) {
  PlanDecodeParams p{};
  p.batch = batch;
  p.heads = pick(random, 1, 128);
  p.max_q_len = pick(random, 1, 4);
  p.overhead_blocks = pick(random, 0, 6);
  p.min_part_blocks = pick(random, 0, 4);
  p.few_pieces = pick(random, 0, 2) * 64;
  p.slack = pick(random, 0, 20);
  p.batch_invariant = batch_invariant;
  const Variant& variant = decode_variants()[pick(random, 0, decode_variants().size() - 1)];
  const int32_t tile_rows = choose_tile_rows(variant, int64_t{p.heads} * p.max_q_len);
  const int32_t row_tiles = ceil_div(p.heads * p.max_q_len, tile_rows);
  std::vector<int32_t> kv_lens(batch), cu_q_lens(batch + 1, 0);
  for (int32_t b = 0; b < batch; ++b) {
    kv_lens[b] = pick(random, 0, 4) == 0 ? pick(random, -2, 0) : pick(random, 1, longest);
    if (alike) kv_lens[b] = b == 0 ? std::max(kv_lens[0], 1) : kv_lens[0];
    cu_q_lens[b + 1] = cu_q_lens[b] + (alike ? p.max_q_len : pick(random, 0, p.max_q_len));
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
  const SplitRule rule = rule_on_host(p);
  const HostPlan expected = plan_on_host(p, rule);
  require(expected.wrong.empty(), expected.wrong);
  const std::string where = "plan_decode, batch " + std::to_string(batch) + ", heads " + std::to_string(p.heads) +
                            ", q " + std::to_string(p.max_q_len) + ", parts " + std::to_string(p.plan.parts);
  require(same_bits(tile_splits, expected.tile_splits), where + ": tile_splits");
  require(same_bits(part_offsets, expected.part_offsets), where + ": part_offsets");
  require(same_bits(items, expected.items), where + ": items");
  return rule.cut;
}

inline std::string plan_group(bool quick) {
  Random random(7);
  int count = 0;
  int cuts[4] = {};
  for (bool batch_invariant : {false, true}) {
    for (bool ragged : {false, true}) {
      for (bool alike : {false, true}) {
        for (int32_t batch : {1, 2, 3, 31, 128, 1024}) {
          if (quick && batch > 31) continue;
          for (int64_t longest : {100, 2000, 9000, 200000, 0x7FFFFFFF}) {
            for (int repeat = 0; repeat < (quick ? 1 : 3); ++repeat, ++count) {
              ++cuts[static_cast<int>(check_plan(random, batch, longest, ragged, alike, batch_invariant))];
            }
          }
        }
      }
    }
    if (quick) continue;
    check_plan(random, 100000, 5000, true, false, batch_invariant);
    ++count;
  }
  return std::to_string(count) + " plans: " + std::to_string(cuts[0]) + " whole, " + std::to_string(cuts[1]) +
         " even, " + std::to_string(cuts[2]) + " line, " + std::to_string(cuts[3]) + " invariant";
}

}  // namespace mla::test
