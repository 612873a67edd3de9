// jax_mla.merge_states: checks, fills the params, launches.
#include "ffi/handlers.h"
#include "ffi/platform.h"

namespace mla {
namespace {

ffi::Error merge_states_handler(Device device, AnyBuffer out_a, AnyBuffer lse_a, AnyBuffer out_b, AnyBuffer lse_b,
                                Result out, Result lse) {
  Checks checks;
  checks.rank("out_a", out_a, 2).floating("out_a", out_a);
  if (checks.failed()) return checks.error();
  const int64_t rows = out_a.dimensions()[0], width = out_a.dimensions()[1];
  checks.shape("out_b", out_b, {rows, width}).shape("out", *out, {rows, width});
  checks.shape("lse_a", lse_a, {rows}).shape("lse_b", lse_b, {rows}).shape("lse", *lse, {rows});
  checks.that(out_a.element_type() == out_b.element_type() && out_a.element_type() == out->element_type(),
              "out_a, out_b and out differ in dtype");
  if (checks.failed()) return checks.error();

  MergeStatesParams params{};
  params.out_a = out_a.untyped_data();
  params.lse_a = data<float>(lse_a);
  params.out_b = out_b.untyped_data();
  params.lse_b = data<float>(lse_b);
  params.out = out->untyped_data();
  params.lse = data<float>(*lse);
  params.rows = rows;
  params.width = static_cast<int32_t>(width);
  params.dtype = *dtype_of(out_a);
  return to_ffi(merge_states(params, device));
}

}  // namespace
}  // namespace mla

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_mla_merge_states, mla::merge_states_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<mla::Device>()
                                  .Arg<ffi::AnyBuffer>()   // out_a
                                  .Arg<ffi::AnyBuffer>()   // lse_a
                                  .Arg<ffi::AnyBuffer>()   // out_b
                                  .Arg<ffi::AnyBuffer>()   // lse_b
                                  .Ret<ffi::AnyBuffer>()   // out
                                  .Ret<ffi::AnyBuffer>(),  // lse
                              {ffi::Traits::kCmdBufferCompatible});
