// mla_prefill's entry on CUDA.
#include <string>
#include <vector>

#include "kernels/capability.h"
#include "kernels/cuda/launch.h"
#include "kernels/prefill/sm90/limits.h"
#include "kernels/prefill/sm90/prefill.h"

namespace mla {
namespace {

Error check(const PrefillParams& p) {
  const auto known = static_cast<int32_t>(variants().size());
  if (p.variant < 0 || p.variant > known) {
    return "jax_mla: mla_prefill's variant is " + std::to_string(p.variant) + ", this module has " +
           std::to_string(known);
  }
  if (p.q_scale != nullptr || p.k_scale != nullptr || p.v_scale != nullptr) {
    return std::string("jax_mla: q_scale, k_scale and v_scale belong to fp8, this mla_prefill has ") + name_of(p.dtype);
  }
  const DType out_dtype = p.merge ? DType::kF32 : p.dtype;
  if (p.out_dtype != out_dtype) {
    return std::string("jax_mla: mla_prefill of ") + name_of(p.dtype) + (p.merge ? " with a carry" : "") + " writes " +
           name_of(out_dtype) + ", out is " + name_of(p.out_dtype);
  }
  return {};
}

bool is_sm90(int32_t variant) { return variant == 0 || variants()[variant - 1] == std::string("sm90"); }

}  // namespace

Error prefill(const PrefillParams& params, const Device& device) {
  if (int64_t{params.tokens} * params.heads == 0) return {};
  Error error = check(params);
  if (!error.empty()) return error;
  int32_t major = 0, minor = 0;
  error = device_attribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error.empty()) error = device_attribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (!error.empty()) return error;
#if defined(JAX_MLA_SM90)
  if (is_sm90(params.variant) && major == 9 && minor == 0 && sm90_prefill::takes(params)) {
    return prefill_sm90(params, device);
  }
#endif
  return std::string(
             "jax_mla: mla_prefill on CUDA has the variant sm90 alone, for bfloat16 and float16, scale > 0 and ") +
         "compute capability 9.0; this call has " + name_of(params.dtype) + ", scale " + std::to_string(params.scale) +
         " and " + std::to_string(major) + "." + std::to_string(minor) +
         (is_sm90(params.variant) ? "" : ", and asks for another variant");
}

}  // namespace mla
