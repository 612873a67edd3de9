// jax_mla.plan_decode and jax_mla.mla_decode: checks, fills the params, launches.
#include "ffi/attention.h"
#include "ffi/handlers.h"
#include "kernels/decode/plan_rule.h"

namespace mla {
namespace {

// The three arrays of a plan. Their sizes follow from `tiles` and `parts`; items and partials may be larger.
DecodePlan plan_of(const AnyBuffer& items, const AnyBuffer& part_offsets, const AnyBuffer& tile_splits,
                   int32_t row_tiles, int32_t tile_rows) {
  DecodePlan plan{};
  plan.items = data<WorkItem>(items);
  plan.part_offsets = data<int32_t>(part_offsets);
  plan.tile_splits = data<TileSplits>(tile_splits);
  plan.parts = static_cast<int32_t>(part_offsets.element_count()) - 1;
  plan.max_items = static_cast<int32_t>(items.dimensions()[0]);
  plan.row_tiles = row_tiles;
  plan.tile_rows = tile_rows;
  return plan;
}

void check_plan(Checks& checks, const AnyBuffer& items, const AnyBuffer& part_offsets, const AnyBuffer& tile_splits,
                int64_t tiles) {
  checks.rank("items", items, 2).rank("part_offsets", part_offsets, 1);
  checks.that(items.dimensions().size() == 2 && items.dimensions()[1] == 8,
              "items has shape " + shape_text(items) + ", expected [max_items, 8]");
  checks.that(part_offsets.element_count() >= 2, "part_offsets needs two elements or more");
  checks.shape("tile_splits", tile_splits, {tiles, 2});
}

ffi::Error plan_decode_handler(Device device, AnyBuffer kv_lens, AnyBuffer cu_q_lens, Result items, Result part_offsets,
                               Result tile_splits, int32_t heads, int32_t max_q_len, int32_t tile_rows,
                               int32_t overhead_blocks, int32_t min_part_blocks, int32_t few_pieces, int32_t slack,
                               bool batch_invariant) {
  Checks checks;
  const int64_t batch = kv_lens.element_count();
  checks.that(heads > 0 && max_q_len > 0 && tile_rows > 0, "heads " + std::to_string(heads) + ", max_q_len " +
                                                               std::to_string(max_q_len) + " and tile_rows " +
                                                               std::to_string(tile_rows) + " must be positive");
  if (checks.failed()) return checks.error();
  const int32_t row_tiles = ceil_div(heads * max_q_len, tile_rows);
  checks.holds("cu_q_lens", cu_q_lens, batch + 1, /*optional=*/true);
  check_plan(checks, *items, *part_offsets, *tile_splits, batch * row_tiles);
  if (checks.failed()) return checks.error();

  PlanDecodeParams params{};
  params.kv_lens = data<int32_t>(kv_lens);
  params.cu_q_lens = optional_data<int32_t>(cu_q_lens);
  params.plan = plan_of(*items, *part_offsets, *tile_splits, row_tiles, tile_rows);
  params.batch = static_cast<int32_t>(batch);
  params.heads = heads;
  params.max_q_len = max_q_len;
  params.overhead_blocks = overhead_blocks;
  params.min_part_blocks = min_part_blocks;
  params.few_pieces = few_pieces;
  params.slack = slack;
  params.batch_invariant = batch_invariant;
  const int64_t needed = max_items(batch * row_tiles, params.plan.parts, batch_invariant);
  if (params.plan.max_items < needed) {
    return invalid("jax_mla: items has " + std::to_string(params.plan.max_items) + " rows, the plan may need " +
                   std::to_string(needed));
  }
  return to_ffi(plan_decode(params, device));
}

ffi::Error decode_handler(Device device, AnyBuffer q, AnyBuffer q_rope, AnyBuffer cache, AnyBuffer layer,
                          AnyBuffer page_table, AnyBuffer kv_lens, AnyBuffer cu_q_lens, AnyBuffer q_scale,
                          AnyBuffer k_scale, AnyBuffer items, AnyBuffer part_offsets, AnyBuffer tile_splits, Result out,
                          Result lse, Result partial_out, Result partial_lse, int32_t max_q_len, int32_t variant,
                          float scale, bool causal) {
  const AttentionOperands operands{q, q_rope, cache, layer, q_scale, k_scale};
  Checks checks;
  operands.check_ranks(checks);
  checks.rank("page_table", page_table, 2).rank("partial_out", *partial_out, 3).floating("out", *out);
  checks.that(max_q_len > 0, "max_q_len is " + std::to_string(max_q_len) + ", expected a positive number");
  if (checks.failed()) return checks.error();
  const int64_t tokens = operands.tokens(), heads = operands.heads();
  const int64_t batch = page_table.dimensions()[0], max_pages = page_table.dimensions()[1];
  const auto tile_rows = static_cast<int32_t>(partial_out->dimensions()[1]);
  checks.that(tile_rows > 0, "partial_out has no rows");
  if (checks.failed()) return checks.error();
  const int32_t row_tiles = ceil_div(static_cast<int32_t>(heads) * max_q_len, tile_rows);

  operands.check_shapes(checks);
  checks.holds("kv_lens", kv_lens, batch).holds("cu_q_lens", cu_q_lens, batch + 1, /*optional=*/true);
  checks.that(cu_q_lens.element_count() != 0 || tokens == batch * max_q_len,
              "q has " + std::to_string(tokens) + " tokens, expected " + std::to_string(batch * max_q_len));
  check_plan(checks, items, part_offsets, tile_splits, batch * row_tiles);
  checks.shape("out", *out, {tokens, heads, kLatent}).shape("lse", *lse, {tokens, heads});
  const int64_t partials = partial_out->dimensions()[0];
  checks.shape("partial_out", *partial_out, {partials, tile_rows, kLatent});
  checks.shape("partial_lse", *partial_lse, {partials, tile_rows});
  if (checks.failed()) return checks.error();

  DecodeParams params{};
  operands.fill(params);
  fill_results(params, out, lse, partial_out, partial_lse);
  params.page_table = data<int32_t>(page_table);
  params.kv_lens = data<int32_t>(kv_lens);
  params.cu_q_lens = optional_data<int32_t>(cu_q_lens);
  params.plan = plan_of(items, part_offsets, tile_splits, row_tiles, tile_rows);
  params.plan.max_partials = static_cast<int32_t>(partials);
  params.pages = operands.pages();
  params.page_size = static_cast<int32_t>(operands.page_size());
  params.max_pages = static_cast<int32_t>(max_pages);
  params.batch = static_cast<int32_t>(batch);
  params.max_q_len = max_q_len;
  params.variant = variant;
  params.scale = scale;
  params.causal = causal;
  return to_ffi(decode(params, device));
}

}  // namespace
}  // namespace mla

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_mla_plan_decode, mla::plan_decode_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<mla::Device>()
                                  .Arg<ffi::AnyBuffer>()  // kv_lens
                                  .Arg<ffi::AnyBuffer>()  // cu_q_lens
                                  .Ret<ffi::AnyBuffer>()  // items
                                  .Ret<ffi::AnyBuffer>()  // part_offsets
                                  .Ret<ffi::AnyBuffer>()  // tile_splits
                                  .Attr<int32_t>("heads")
                                  .Attr<int32_t>("max_q_len")
                                  .Attr<int32_t>("tile_rows")
                                  .Attr<int32_t>("overhead_blocks")
                                  .Attr<int32_t>("min_part_blocks")
                                  .Attr<int32_t>("few_pieces")
                                  .Attr<int32_t>("slack")
                                  .Attr<bool>("batch_invariant"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_mla_decode, mla::decode_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<mla::Device>()
                                  .Arg<ffi::AnyBuffer>()  // q
                                  .Arg<ffi::AnyBuffer>()  // q_rope
                                  .Arg<ffi::AnyBuffer>()  // cache
                                  .Arg<ffi::AnyBuffer>()  // layer
                                  .Arg<ffi::AnyBuffer>()  // page_table
                                  .Arg<ffi::AnyBuffer>()  // kv_lens
                                  .Arg<ffi::AnyBuffer>()  // cu_q_lens
                                  .Arg<ffi::AnyBuffer>()  // q_scale
                                  .Arg<ffi::AnyBuffer>()  // k_scale
                                  .Arg<ffi::AnyBuffer>()  // items
                                  .Arg<ffi::AnyBuffer>()  // part_offsets
                                  .Arg<ffi::AnyBuffer>()  // tile_splits
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Ret<ffi::AnyBuffer>()  // lse
                                  .Ret<ffi::AnyBuffer>()  // partial_out
                                  .Ret<ffi::AnyBuffer>()  // partial_lse
                                  .Attr<int32_t>("max_q_len")
                                  .Attr<int32_t>("variant")
                                  .Attr<float>("scale")
                                  .Attr<bool>("causal"),
                              {ffi::Traits::kCmdBufferCompatible});
