// mla_prefill's entry on CUDA: picks the kernel for the call.
#include <string>
#include <vector>

#include "kernels/capability.h"
#include "kernels/cuda/launch.h"
#include "kernels/prefill/generic/limits.h"
#include "kernels/prefill/generic/prefill.h"
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

std::string described(const PrefillParams& p) {
  return std::string("; this call has ") + name_of(p.dtype) + ", scale " + std::to_string(p.scale) + ", " +
         std::to_string(p.tokens) + " queries and " + std::to_string(p.stored) + " keys of " + std::to_string(p.heads) +
         " heads";
}

Error attend(const PrefillParams& p, const Device& device, int32_t compute_capability) {
  const std::string variant = p.variant == 0 ? "" : variants()[p.variant - 1];
#if defined(JAX_MLA_SM90)
  if (variant != "generic" && compute_capability == 90 && sm90_prefill::takes(p)) return prefill_sm90(p, device);
#endif
  if (variant == "sm90") {
    return "jax_mla: mla_prefill's Hopper kernel takes bfloat16 and float16 with scale > 0 on compute capability 9.0" +
           described(p) + " on " + std::to_string(compute_capability / 10) + "." +
           std::to_string(compute_capability % 10);
  }
  if (generic_prefill::takes(p)) return prefill_generic(p, device);
  return "jax_mla: mla_prefill's generic kernel takes bfloat16 and float16, and counts with 29 bits" + described(p);
}

}  // namespace

Error prefill(const PrefillParams& params, const Device& device) {
  if (int64_t{params.tokens} * params.heads == 0) return {};
  Error error = check(params);
  if (!error.empty()) return error;
  int32_t major = 0, minor = 0;
  error = device_attribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error.empty()) error = device_attribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (!error.empty()) return error;
  return attend(params, device, major * 10 + minor);
}

}  // namespace mla
