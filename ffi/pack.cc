// jax_mla.pack_kv and jax_mla.pack_kv_fp8: checks, fills the params, launches.
#include "ffi/handlers.h"
#include "ffi/platform.h"

namespace mla {
namespace {

// k_pe is [T, R], or the gathered latent rows [T, D] whose last R columns are taken.
PackKvParams params_of(Checks& checks, const AnyBuffer& kv_up, const AnyBuffer& k_pe, const AnyBuffer& k_scale,
                       const AnyBuffer& k) {
  PackKvParams params{};
  checks.rank("kv_up", kv_up, 3).rank("k_pe", k_pe, 2);
  checks.floating("kv_up", kv_up).floating("k_pe", k_pe).floating("k", k);
  checks.holds("k_scale", k_scale, 1, /*optional=*/true);
  if (checks.failed()) return params;
  const int64_t tokens = kv_up.dimensions()[0], heads = kv_up.dimensions()[1], width = k_pe.dimensions()[1];
  checks.shape("kv_up", kv_up, {tokens, heads, 2 * kNope}).shape("k", k, {tokens, heads, kHeadDim});
  checks.shape("k_pe", k_pe, {tokens, width == kWidth ? kWidth : kRope});
  if (checks.failed()) return params;
  params.kv_up = kv_up.untyped_data();
  params.k_pe = k_pe.untyped_data();
  params.k_scale = optional_data<float>(k_scale);
  params.k = k.untyped_data();
  params.k_pe_stride = width;
  params.k_pe_offset = width - kRope;
  params.tokens = tokens;
  params.heads = static_cast<int32_t>(heads);
  params.input_dtype = *dtype_of(kv_up);
  params.k_pe_dtype = *dtype_of(k_pe);
  params.output_dtype = *dtype_of(k);
  return params;
}

ffi::Error pack_kv_handler(Device device, AnyBuffer kv_up, AnyBuffer k_pe, AnyBuffer k_scale, Result k) {
  Checks checks;
  const PackKvParams params = params_of(checks, kv_up, k_pe, k_scale, *k);
  if (checks.failed()) return checks.error();
  return to_ffi(pack_kv(params, device));
}

ffi::Error pack_kv_fp8_handler(Device device, AnyBuffer kv_up, AnyBuffer k_pe, AnyBuffer k_scale,
                               AnyBuffer packed_k_scale, AnyBuffer packed_v_scale, Result k, Result v, bool saturate) {
  Checks checks;
  PackKvParams params = params_of(checks, kv_up, k_pe, k_scale, *k);
  if (checks.failed()) return checks.error();
  const bool tiled = v->dimensions().size() == 4;
  if (tiled) {
    const int64_t tiles = (params.tokens + kValueTile - 1) / kValueTile;
    checks.shape("v", *v, {tiles, params.heads, kNope, kValueTile});
  } else {
    checks.shape("v", *v, {params.tokens, params.heads, kNope});
  }
  checks.that(v->element_type() == k->element_type(), "k and v differ in dtype");
  checks.holds("packed_k_scale", packed_k_scale, 1, true).holds("packed_v_scale", packed_v_scale, 1, true);
  if (checks.failed()) return checks.error();
  params.packed_k_scale = optional_data<float>(packed_k_scale);
  params.packed_v_scale = optional_data<float>(packed_v_scale);
  params.v = v->untyped_data();
  params.v_tiled = tiled;
  params.saturate = saturate;
  return to_ffi(pack_kv(params, device));
}

}  // namespace
}  // namespace mla

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_mla_pack_kv, mla::pack_kv_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<mla::Device>()
                                  .Arg<ffi::AnyBuffer>()   // kv_up
                                  .Arg<ffi::AnyBuffer>()   // k_pe
                                  .Arg<ffi::AnyBuffer>()   // k_scale
                                  .Ret<ffi::AnyBuffer>(),  // k
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_mla_pack_kv_fp8, mla::pack_kv_fp8_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<mla::Device>()
                                  .Arg<ffi::AnyBuffer>()  // kv_up
                                  .Arg<ffi::AnyBuffer>()  // k_pe
                                  .Arg<ffi::AnyBuffer>()  // k_scale
                                  .Arg<ffi::AnyBuffer>()  // packed_k_scale
                                  .Arg<ffi::AnyBuffer>()  // packed_v_scale
                                  .Ret<ffi::AnyBuffer>()  // k
                                  .Ret<ffi::AnyBuffer>()  // v
                                  .Attr<bool>("saturate"),
                              {ffi::Traits::kCmdBufferCompatible});
