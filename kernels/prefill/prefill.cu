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

bool is_fp8(DType dtype) { return dtype == DType::kE4M3FN || dtype == DType::kE4M3FNUZ; }

std::string kinds(const PrefillParams& p) {
  const std::string keys = name_of(p.dtype);
  if (p.v_tiled) return keys + " with values in tiles of " + name_of(p.v_dtype);
  return p.v_dtype == p.dtype ? keys : keys + " with values in " + name_of(p.v_dtype);
}

Error check(const PrefillParams& p) {
  const auto known = static_cast<int32_t>(variants().size());
  if (p.variant < 0 || p.variant > known) {
    return "jax_mla: mla_prefill's variant is " + std::to_string(p.variant) + ", this module has " +
           std::to_string(known);
  }
  const bool fp8 = is_fp8(p.dtype);
  if (fp8 && p.k_pe != nullptr) {
    return "jax_mla: mla_prefill of " + kinds(p) + " takes keys as one array, and has a k_pe";
  }
  if ((!fp8 && (p.q_scale != nullptr || p.k_scale != nullptr)) || (!is_fp8(p.v_dtype) && p.v_scale != nullptr)) {
    return "jax_mla: q_scale, k_scale and v_scale belong to fp8, this mla_prefill has " + kinds(p);
  }
  const DType out_dtype = p.merge ? DType::kF32 : fp8 ? DType::kBF16 : p.dtype;
  if (p.out_dtype != out_dtype) {
    return "jax_mla: mla_prefill of " + kinds(p) + (p.merge ? " with a carry" : "") + " writes " + name_of(out_dtype) +
           ", out is " + name_of(p.out_dtype);
  }
  return {};
}

std::string described(const PrefillParams& p) {
  return "; this call has " + kinds(p) + ", scale " + std::to_string(p.scale) + ", " + std::to_string(p.tokens) +
         " queries and " + std::to_string(p.stored) + " keys of " + std::to_string(p.heads) + " heads";
}

Error attend(const PrefillParams& p, const Device& device, int32_t compute_capability) {
  const std::string variant = p.variant == 0 ? "" : variants()[p.variant - 1];
#if defined(JAX_MLA_SM90)
  if (variant != "generic" && compute_capability == 90 && sm90_prefill::takes(p)) return prefill_sm90(p, device);
#endif
  if (variant == "sm90") {
    return "jax_mla: mla_prefill's Hopper kernel takes bfloat16 and float16 with scale > 0, and float8_e4m3fn with "
           "values in bfloat16 or in tiles of float8_e4m3fn, on compute capability 9.0" +
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
