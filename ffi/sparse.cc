// jax_mla.mla_sparse_decode: checks, fills the params, launches.
#include <limits>

#include "ffi/handlers.h"
#include "ffi/platform.h"

namespace mla {
namespace {

ffi::Error sparse_decode_handler(Device device, AnyBuffer q, AnyBuffer q_rope, AnyBuffer cache, AnyBuffer layer,
                                 AnyBuffer indices, AnyBuffer topk_lens, AnyBuffer sink, AnyBuffer q_scale,
                                 AnyBuffer k_scale, Result out, Result lse, Result partial_out, Result partial_lse,
                                 int32_t splits, int32_t tile_rows, int32_t variant, float scale) {
  Checks checks;
  const bool ds_mla = cache.element_type() == ffi::DataType::U8;
  checks.rank("q", q, 3).rank("cache", cache, 4).rank("indices", indices, 2).floating("q", q).floating("out", *out);
  if (!ds_mla) checks.floating("cache", cache);
  checks.that(splits > 0 && tile_rows > 0,
              "splits " + std::to_string(splits) + " and tile_rows " + std::to_string(tile_rows) + " must be positive");
  if (checks.failed()) return checks.error();
  const bool pair = q_rope.element_count() != 0;
  const int64_t tokens = q.dimensions()[0], heads = q.dimensions()[1], topk = indices.dimensions()[1];
  const int64_t layers = cache.dimensions()[0], pages = cache.dimensions()[1], page_size = cache.dimensions()[2];

  checks.shape("q", q, {tokens, heads, pair ? kLatent : kWidth});
  if (pair) checks.shape("q_rope", q_rope, {tokens, heads, kRope});
  checks.that(!pair || q_rope.element_type() == q.element_type(), "q and q_rope differ in dtype");
  checks.shape("cache", cache, {layers, pages, page_size, ds_mla ? kDsMlaBytes : kWidth});
  checks.shape("indices", indices, {tokens, topk}).holds("indices", indices, tokens * topk);
  checks.that(topk <= std::numeric_limits<int32_t>::max() - kBlockTokens,
              "indices has " + std::to_string(topk) + " a token, which 32 bits do not count");
  checks.holds("topk_lens", topk_lens, tokens, /*optional=*/true).holds("sink", sink, heads, /*optional=*/true);
  checks.holds("layer", layer, 1, /*optional=*/layers == 1);
  checks.holds("q_scale", q_scale, 1, /*optional=*/true).holds("k_scale", k_scale, 1, /*optional=*/true);
  checks.that(
      k_scale.element_count() <= 1 || k_scale.element_count() == static_cast<size_t>(layers),
      "k_scale has " + std::to_string(k_scale.element_count()) + " elements, expected 1 or " + std::to_string(layers));
  checks.shape("out", *out, {tokens, heads, kLatent}).shape("lse", *lse, {tokens, heads});
  const int64_t partials = splits == 1 ? 0 : splits;
  checks.shape("partial_out", *partial_out, {partials, tokens, heads, kLatent});
  checks.shape("partial_lse", *partial_lse, {partials, tokens, heads});
  if (checks.failed()) return checks.error();

  SparseDecodeParams params{};
  params.q_latent = q.untyped_data();
  params.q_latent_stride = pair ? kLatent : kWidth;
  const int64_t rope_offset = kLatent * static_cast<int64_t>(ffi::ByteWidth(q.element_type()));
  params.q_rope = pair ? q_rope.untyped_data() : data<char>(q) + rope_offset;
  params.q_rope_stride = pair ? kRope : kWidth;
  params.cache = cache.untyped_data();
  params.layer = optional_data<int32_t>(layer);
  params.indices = data<int32_t>(indices);
  params.topk_lens = optional_data<int32_t>(topk_lens);
  params.sink = optional_data<float>(sink);
  params.q_scale = optional_data<float>(q_scale);
  params.k_scale = optional_data<float>(k_scale);
  params.out = out->untyped_data();
  params.lse = data<float>(*lse);
  params.partial_out = data<float>(*partial_out);
  params.partial_lse = data<float>(*partial_lse);
  params.slots = pages * page_size;
  params.layers = static_cast<int32_t>(layers);
  params.tokens = static_cast<int32_t>(tokens);
  params.heads = static_cast<int32_t>(heads);
  params.topk = static_cast<int32_t>(topk);
  params.splits = splits;
  params.tile_rows = tile_rows;
  params.k_scales = static_cast<int32_t>(k_scale.element_count());
  params.variant = variant;
  params.scale = scale;
  params.ds_mla = ds_mla;
  params.q_dtype = *dtype_of(q);
  params.cache_dtype = ds_mla ? DType::kE4M3FN : *dtype_of(cache);
  params.out_dtype = *dtype_of(*out);
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
