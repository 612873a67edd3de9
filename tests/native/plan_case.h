// A call of plan_decode alone: no cache behind its lengths.
#pragma once

#include "tests/native/decode_case.h"
#include "tests/native/host_plan.h"

namespace mla::test {

struct PlanCase {
  DecodeShape shape;
  Buffer<int32_t> kv_lens, cu_q_lens{0}, part_offsets;
  Buffer<WorkItem> items;
  Buffer<TileSplits> splits;

  explicit PlanCase(const DecodeShape& s) : shape(s), kv_lens(s.kv_lens.begin(), s.kv_lens.end()) {
    for (int n : s.q_lens) cu_q_lens.push_back(cu_q_lens.back() + n);
    const int64_t tiles = int64_t{s.batch()} * row_tiles();
    items.resize(max_items(tiles, s.parts, s.batch_invariant));
    splits.resize(tiles);
    part_offsets.resize(s.parts + 1);
    std::memset(static_cast<void*>(items.data()), 0x5a, items.size() * sizeof(WorkItem));
  }

  int32_t row_tiles() const { return ceil_div(shape.heads * shape.max_q_len, shape.tile_rows); }

  PlanDecodeParams params() {
    const int64_t tiles = int64_t{shape.batch()} * row_tiles();
    return {
        kv_lens.data(),
        shape.ragged ? cu_q_lens.data() : nullptr,
        {items.data(), part_offsets.data(), splits.data(), shape.parts, static_cast<int32_t>(items.size()),
         static_cast<int32_t>(max_partials(tiles, shape.parts, shape.batch_invariant)), row_tiles(), shape.tile_rows},
        shape.batch(),
        shape.heads,
        shape.max_q_len,
        /*overhead_blocks=*/1,
        /*min_part_blocks=*/2,
        /*few_pieces=*/64,
        /*slack=*/16,
        shape.batch_invariant};
  }
};

}  // namespace mla::test
