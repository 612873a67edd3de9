// jax_mla.mla_prefill: checks, fills the params, launches.
#include "ffi/handlers.h"
#include "ffi/platform.h"

namespace mla {
namespace {

// The carry's buffers, brought into the results where XLA dropped the alias: the result is then still unwritten.
Error carry_into(const AnyBuffer& result, const AnyBuffer& carry, const Device& device) {
  if (result.untyped_data() == carry.untyped_data()) return {};
  return copy(result.untyped_data(), carry.untyped_data(), static_cast<int64_t>(carry.size_bytes()), device);
}

// Whether keys come as their parts: an absent k_pe is an empty array of one axis.
bool is_pair(const AnyBuffer& k_pe) { return k_pe.dimensions().size() == 2; }

// k is [S, H, 192]; or, beside a k_pe, the nope parts [S, H, 128] or the whole up-projection [S, H, 256]. k_pe is [S,
// R], or the gathered latent rows [S, D] whose last R columns are taken.
void check_keys(Checks& checks, const AnyBuffer& k, const AnyBuffer& k_pe, int64_t heads) {
  const int64_t stored = k.dimensions()[0], width = k.dimensions()[2];
  if (!is_pair(k_pe)) {
    checks.shape("k", k, {stored, heads, kHeadDim});
    return;
  }
  checks.shape("k", k, {stored, heads, width == 2 * kNope ? 2 * kNope : kNope});
  checks.shape("k_pe", k_pe, {stored, k_pe.dimensions()[1] == kWidth ? kWidth : kRope});
  checks.that(k_pe.element_type() == k.element_type(), "k and k_pe differ in dtype");
}

ffi::Error prefill_handler(Device device, AnyBuffer q, AnyBuffer k, AnyBuffer k_pe, AnyBuffer v, AnyBuffer cu_q_lens,
                           AnyBuffer cu_kv_lens, AnyBuffer key_mask, AnyBuffer q_scale, AnyBuffer k_scale,
                           AnyBuffer v_scale, AnyBuffer carry_out, AnyBuffer carry_lse, Result out, Result lse,
                           Result scratch, int32_t value_offset, int32_t variant, float scale, bool causal) {
  Checks checks;
  checks.rank("q", q, 3).rank("k", k, 3).floating("q", q).floating("v", v).floating("out", *out);
  checks.that(cu_q_lens.element_count() >= 2, "cu_q_lens needs two elements or more");
  checks.that(value_offset == 0 || value_offset == kNope,
              "value_offset is " + std::to_string(value_offset) + ", expected 0 or " + std::to_string(kNope));
  if (checks.failed()) return checks.error();
  const int64_t tokens = q.dimensions()[0], heads = q.dimensions()[1], stored = k.dimensions()[0];
  const auto batch = static_cast<int64_t>(cu_q_lens.element_count()) - 1;
  const int64_t v_width = kNope + value_offset;
  const bool merge = carry_lse.element_count() != 0;

  checks.shape("q", q, {tokens, heads, kHeadDim});
  check_keys(checks, k, k_pe, heads);
  const bool tiled = v.dimensions().size() == 4;
  if (tiled) {
    checks.shape("v", v, {(stored + kValueTile - 1) / kValueTile, heads, kNope, kValueTile});
    checks.that(v.element_type() == ffi::DataType::F8E4M3FN, "v in tiles is float8_e4m3fn");
  } else {
    checks.shape("v", v, {stored, heads, v_width});
  }
  checks.that(k.element_type() == q.element_type(), "q and k differ in dtype");
  checks.that(v.element_type() == q.element_type() || v.element_type() == ffi::DataType::BF16,
              "v has neither q's dtype nor bfloat16");
  checks.holds("cu_q_lens", cu_q_lens, batch + 1).holds("cu_kv_lens", cu_kv_lens, batch + 1);
  checks.holds("key_mask", key_mask, (stored + 31) / 32, /*optional=*/true);
  checks.holds("q_scale", q_scale, 1, true).holds("k_scale", k_scale, 1, true).holds("v_scale", v_scale, 1, true);
  checks.shape("out", *out, {tokens, heads, kNope})
      .shape("lse", *lse, {tokens, heads})
      .holds("lse", *lse, tokens * heads);
  if (merge) {
    checks.shape("carry_out", carry_out, {tokens, heads, kNope}).shape("carry_lse", carry_lse, {tokens, heads});
    checks.that(carry_out.element_type() == ffi::DataType::F32 && carry_lse.element_type() == ffi::DataType::F32 &&
                    out->element_type() == ffi::DataType::F32,
                "a carry and the result that it is merged into are float32");
  }
  if (checks.failed()) return checks.error();

  if (merge) {
    Error error = carry_into(*out, carry_out, device);
    if (error.empty()) error = carry_into(*lse, carry_lse, device);
    if (!error.empty()) return to_ffi(error);
  }

  PrefillParams params{};
  params.q = q.untyped_data();
  params.k = k.untyped_data();
  params.k_stride = k.dimensions()[2];
  if (is_pair(k_pe)) {
    params.k_pe = k_pe.untyped_data();
    params.k_pe_stride = k_pe.dimensions()[1];
    params.k_pe_offset = params.k_pe_stride - kRope;
  }
  params.v = v.untyped_data();
  params.v_stride = v_width;
  params.v_offset = value_offset;
  params.cu_q_lens = data<int32_t>(cu_q_lens);
  params.cu_kv_lens = data<int32_t>(cu_kv_lens);
  params.key_mask = optional_data<uint32_t>(key_mask);
  params.q_scale = optional_data<float>(q_scale);
  params.k_scale = optional_data<float>(k_scale);
  params.v_scale = optional_data<float>(v_scale);
  params.out = out->untyped_data();
  params.lse = data<float>(*lse);
  params.stored = stored;
  params.tokens = static_cast<int32_t>(tokens);
  params.batch = static_cast<int32_t>(batch);
  params.heads = static_cast<int32_t>(heads);
  params.variant = variant;
  params.scale = scale;
  params.causal = causal;
  params.merge = merge;
  params.dtype = *dtype_of(q);
  params.v_dtype = *dtype_of(v);
  params.v_tiled = tiled;
  params.out_dtype = *dtype_of(*out);
  params.scratch = scratch->untyped_data();
  params.scratch_bytes = static_cast<int64_t>(scratch->size_bytes());
  return to_ffi(prefill(params, device));
}

}  // namespace
}  // namespace mla

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_mla_prefill, mla::prefill_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<mla::Device>()
                                  .Arg<ffi::AnyBuffer>()  // q
                                  .Arg<ffi::AnyBuffer>()  // k
                                  .Arg<ffi::AnyBuffer>()  // k_pe
                                  .Arg<ffi::AnyBuffer>()  // v
                                  .Arg<ffi::AnyBuffer>()  // cu_q_lens
                                  .Arg<ffi::AnyBuffer>()  // cu_kv_lens
                                  .Arg<ffi::AnyBuffer>()  // key_mask
                                  .Arg<ffi::AnyBuffer>()  // q_scale
                                  .Arg<ffi::AnyBuffer>()  // k_scale
                                  .Arg<ffi::AnyBuffer>()  // v_scale
                                  .Arg<ffi::AnyBuffer>()  // carry_out, aliased with out where there is one
                                  .Arg<ffi::AnyBuffer>()  // carry_lse, likewise
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Ret<ffi::AnyBuffer>()  // lse
                                  .Ret<ffi::AnyBuffer>()  // scratch
                                  .Attr<int32_t>("value_offset")
                                  .Attr<int32_t>("variant")
                                  .Attr<float>("scale")
                                  .Attr<bool>("causal"),
                              {ffi::Traits::kCmdBufferCompatible});
