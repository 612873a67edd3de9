// The gather of jax_mla.mla_context: checks, fills the params, launches.
#include "ffi/handlers.h"
#include "ffi/platform.h"

namespace mla {
namespace {

ffi::Error gather_context_handler(Device device, AnyBuffer cache, AnyBuffer layer, AnyBuffer k_scale,
                                  AnyBuffer page_table, AnyBuffer starts, AnyBuffer cu_kv_lens, Result latent,
                                  Result rope) {
  Checks checks;
  const bool ds_mla = cache.element_type() == ffi::DataType::U8;
  checks.rank("cache", cache, 4).rank("page_table", page_table, 2).rank("latent", *latent, 2);
  if (!ds_mla) checks.floating("cache", cache);
  checks.floating("latent", *latent);
  if (checks.failed()) return checks.error();
  const int64_t layers = cache.dimensions()[0], pages = cache.dimensions()[1], page_size = cache.dimensions()[2];
  const int64_t batch = page_table.dimensions()[0], rows = latent->dimensions()[0];
  checks.shape("cache", cache, {layers, pages, page_size, ds_mla ? kDsMlaBytes : kWidth});
  checks.that(page_size > 0, "cache has pages of 0 tokens");
  checks.holds("page_table", page_table, static_cast<int64_t>(page_table.element_count()));
  checks.holds("starts", starts, batch).holds("cu_kv_lens", cu_kv_lens, batch + 1);
  checks.holds("layer", layer, 1, /*optional=*/layers == 1);
  checks.that(
      k_scale.element_count() <= 1 || k_scale.element_count() == static_cast<size_t>(layers),
      "k_scale has " + std::to_string(k_scale.element_count()) + " elements, expected 1 or " + std::to_string(layers));
  checks.shape("latent", *latent, {rows, kLatent}).shape("rope", *rope, {rows, kRope});
  checks.that(rope->element_type() == latent->element_type(), "latent and rope differ in dtype");
  if (checks.failed()) return checks.error();

  GatherContextParams params{};
  params.cache = cache.untyped_data();
  params.layer = optional_data<int32_t>(layer);
  params.k_scale = optional_data<float>(k_scale);
  params.page_table = data<int32_t>(page_table);
  params.starts = data<int32_t>(starts);
  params.cu_kv_lens = data<int32_t>(cu_kv_lens);
  params.latent = latent->untyped_data();
  params.rope = rope->untyped_data();
  params.pages = pages;
  params.rows = static_cast<int32_t>(rows);
  params.layers = static_cast<int32_t>(layers);
  params.page_size = static_cast<int32_t>(page_size);
  params.max_pages = static_cast<int32_t>(page_table.dimensions()[1]);
  params.batch = static_cast<int32_t>(batch);
  params.k_scales = static_cast<int32_t>(k_scale.element_count());
  params.ds_mla = ds_mla;
  params.cache_dtype = ds_mla ? DType::kE4M3FN : *dtype_of(cache);
  params.output_dtype = *dtype_of(*latent);
  return to_ffi(gather_context(params, device));
}

}  // namespace
}  // namespace mla

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_mla_gather_context, mla::gather_context_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<mla::Device>()
                                  .Arg<ffi::AnyBuffer>()   // cache
                                  .Arg<ffi::AnyBuffer>()   // layer
                                  .Arg<ffi::AnyBuffer>()   // k_scale
                                  .Arg<ffi::AnyBuffer>()   // page_table
                                  .Arg<ffi::AnyBuffer>()   // starts
                                  .Arg<ffi::AnyBuffer>()   // cu_kv_lens
                                  .Ret<ffi::AnyBuffer>()   // latent
                                  .Ret<ffi::AnyBuffer>(),  // rope
                              {ffi::Traits::kCmdBufferCompatible});
