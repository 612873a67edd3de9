// jax_mla.mla_sparse_decode: checks, fills the params, launches.
#include <limits>

#include "ffi/attention.h"
#include "ffi/handlers.h"

namespace mla {
namespace {

ffi::Error sparse_decode_handler(Device device, AnyBuffer q, AnyBuffer q_rope, AnyBuffer cache, AnyBuffer layer,
                                 AnyBuffer indices, AnyBuffer topk_lens, AnyBuffer sink, AnyBuffer q_scale,
                                 AnyBuffer k_scale, Result out, Result lse, Result partial_out, Result partial_lse,
                                 int32_t splits, int32_t tile_rows, int32_t variant, float scale) {
  const AttentionOperands operands{q, q_rope, cache, layer, q_scale, k_scale};
  Checks checks;
  operands.check_ranks(checks);
  checks.rank("indices", indices, 2).floating("out", *out);
  checks.that(splits > 0 && tile_rows > 0,
              "splits " + std::to_string(splits) + " and tile_rows " + std::to_string(tile_rows) + " must be positive");
  if (checks.failed()) return checks.error();
  const int64_t tokens = operands.tokens(), heads = operands.heads(), topk = indices.dimensions()[1];

  operands.check_shapes(checks);
  checks.shape("indices", indices, {tokens, topk}).holds("indices", indices, tokens * topk);
  checks.that(topk <= std::numeric_limits<int32_t>::max() - kBlockTokens,
              "indices has " + std::to_string(topk) + " a token, which 32 bits do not count");
  checks.holds("topk_lens", topk_lens, tokens, /*optional=*/true).holds("sink", sink, heads, /*optional=*/true);
  checks.shape("out", *out, {tokens, heads, kLatent}).shape("lse", *lse, {tokens, heads});
  const int64_t partials = splits == 1 ? 0 : splits;
  checks.shape("partial_out", *partial_out, {partials, tokens, heads, kLatent});
  checks.shape("partial_lse", *partial_lse, {partials, tokens, heads});
  if (checks.failed()) return checks.error();

  SparseDecodeParams params{};
  operands.fill(params);
  fill_results(params, out, lse, partial_out, partial_lse);
  params.indices = data<int32_t>(indices);
  params.topk_lens = optional_data<int32_t>(topk_lens);
  params.sink = optional_data<float>(sink);
  params.slots = operands.pages() * operands.page_size();
  params.topk = static_cast<int32_t>(topk);
  params.splits = splits;
  params.tile_rows = tile_rows;
  params.variant = variant;
  params.scale = scale;
  return to_ffi(sparse_decode(params, device));
}

}  // namespace
}  // namespace mla

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_mla_sparse_decode, mla::sparse_decode_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<mla::Device>()
                                  .Arg<ffi::AnyBuffer>()  // q
                                  .Arg<ffi::AnyBuffer>()  // q_rope
                                  .Arg<ffi::AnyBuffer>()  // cache
                                  .Arg<ffi::AnyBuffer>()  // layer
                                  .Arg<ffi::AnyBuffer>()  // indices
                                  .Arg<ffi::AnyBuffer>()  // topk_lens
                                  .Arg<ffi::AnyBuffer>()  // sink
                                  .Arg<ffi::AnyBuffer>()  // q_scale
                                  .Arg<ffi::AnyBuffer>()  // k_scale
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Ret<ffi::AnyBuffer>()  // lse
                                  .Ret<ffi::AnyBuffer>()  // partial_out
                                  .Ret<ffi::AnyBuffer>()  // partial_lse
                                  .Attr<int32_t>("splits")
                                  .Attr<int32_t>("tile_rows")
                                  .Attr<int32_t>("variant")
                                  .Attr<float>("scale"),
                              {ffi::Traits::kCmdBufferCompatible});
