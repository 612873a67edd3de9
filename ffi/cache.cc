// jax_mla.update_cache: checks, fills the params, launches.
#include "ffi/handlers.h"
#include "ffi/platform.h"

namespace mla {
namespace {

ffi::Error update_cache_handler(Device device, AnyBuffer cache, AnyBuffer kv_c, AnyBuffer k_pe, AnyBuffer slot_mapping,
                                AnyBuffer layer, AnyBuffer k_scale, Result updated, Result owners, bool saturate,
                                bool power_of_two_scales) {
  Checks checks;
  const bool ds_mla = cache.element_type() == ffi::DataType::U8;
  checks.rank("cache", cache, 4).floating("kv_c", kv_c);
  if (!ds_mla) checks.floating("cache", cache);
  if (checks.failed()) return checks.error();
  const int64_t layers = cache.dimensions()[0], pages = cache.dimensions()[1], page_size = cache.dimensions()[2];
  const auto tokens = static_cast<int64_t>(slot_mapping.element_count());
  const int64_t width = ds_mla ? kDsMlaBytes : kWidth;
  checks.shape("cache", cache, {layers, pages, page_size, width});
  checks.shape("the updated cache", *updated, {layers, pages, page_size, width});
  checks.that(updated->element_type() == cache.element_type(), "the updated cache has another dtype than the cache");
  checks.shape("kv_c", kv_c, {tokens, kLatent}).shape("k_pe", k_pe, {tokens, kRope});
  checks.that(k_pe.element_type() == kv_c.element_type(), "kv_c and k_pe differ in dtype");
  checks.holds("slot_mapping", slot_mapping, tokens).holds("layer", layer, 1, /*optional=*/layers == 1);
  checks.that(
      k_scale.element_count() <= 1 || k_scale.element_count() == static_cast<size_t>(layers),
      "k_scale has " + std::to_string(k_scale.element_count()) + " elements, expected 1 or " + std::to_string(layers));
  const auto owner_slots = static_cast<int64_t>(owners->element_count() / 2);
  checks.that(owner_slots == 0 || (owner_slots >= 2 * tokens && (owner_slots & (owner_slots - 1)) == 0),
              "owners has " + std::to_string(owner_slots) + " slots, expected 0 or a power of two from " +
                  std::to_string(2 * tokens));
  if (checks.failed()) return checks.error();

  // XLA may fold an aliased call into a fusion and drop the alias: then the result is another buffer, still unwritten.
  if (updated->untyped_data() != cache.untyped_data()) {
    const Error error = copy(updated->untyped_data(), cache.untyped_data(), cache.size_bytes(), device);
    if (!error.empty()) return to_ffi(error);
  }
  if (tokens == 0) return ffi::Error::Success();

  UpdateCacheParams params{};
  params.cache = updated->untyped_data();
  params.kv_c = kv_c.untyped_data();
  params.k_pe = k_pe.untyped_data();
  params.slot_mapping = data<int32_t>(slot_mapping);
  params.layer = optional_data<int32_t>(layer);
  params.k_scale = optional_data<float>(k_scale);
  params.owners = owner_slots == 0 ? nullptr : data<int32_t>(*owners);
  params.pages = pages;
  params.owner_slots = static_cast<int32_t>(owner_slots);
  params.layers = static_cast<int32_t>(layers);
  params.page_size = static_cast<int32_t>(page_size);
  params.tokens = static_cast<int32_t>(tokens);
  params.k_scales = static_cast<int32_t>(k_scale.element_count());
  params.saturate = saturate;
  params.ds_mla = ds_mla;
  params.power_of_two_scales = power_of_two_scales;
  params.input_dtype = *dtype_of(kv_c);
  params.cache_dtype = ds_mla ? DType::kE4M3FN : *dtype_of(cache);
  return to_ffi(update_cache(params, device));
}

}  // namespace
}  // namespace mla

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_mla_update_cache, mla::update_cache_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<mla::Device>()
                                  .Arg<ffi::AnyBuffer>()  // cache, aliased with the first result
                                  .Arg<ffi::AnyBuffer>()  // kv_c
                                  .Arg<ffi::AnyBuffer>()  // k_pe
                                  .Arg<ffi::AnyBuffer>()  // slot_mapping
                                  .Arg<ffi::AnyBuffer>()  // layer
                                  .Arg<ffi::AnyBuffer>()  // k_scale
                                  .Ret<ffi::AnyBuffer>()  // the updated cache
                                  .Ret<ffi::AnyBuffer>()  // owners
                                  .Attr<bool>("saturate")
                                  .Attr<bool>("power_of_two_scales"),
                              {ffi::Traits::kCmdBufferCompatible});
