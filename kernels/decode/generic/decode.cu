// mla_decode's entry on CUDA: picks the kernel for the call, launches it and then the reduction.
#include <limits>

#include "kernels/capability.h"
#include "kernels/cuda/launch.h"
#include "kernels/decode/generic/instance.h"
#include "kernels/decode/reduce.h"

namespace mla {
namespace {

Error check(const DecodeParams& p) {
  const auto known = static_cast<int32_t>(variants().size());
  if (p.variant < 0 || p.variant > known) {
    return "jax_mla: mla_decode's variant is " + std::to_string(p.variant) + ", this module has " +
           std::to_string(known);
  }
  if (p.q_dtype != p.cache_dtype || p.out_dtype != p.q_dtype) {
    return std::string("jax_mla: mla_decode on CUDA takes q, cache and out of one dtype, these are ") +
           name_of(p.q_dtype) + ", " + name_of(p.cache_dtype) + " and " + name_of(p.out_dtype);
  }
  if (p.q_scale != nullptr || p.k_scale != nullptr) {
    return std::string("jax_mla: q_scale and k_scale belong to fp8, the cache of this mla_decode is ") +
           name_of(p.cache_dtype);
  }
  if (p.pages * p.page_size > std::numeric_limits<int32_t>::max()) {
    return "jax_mla: slots are 32-bit numbers, a cache of " + std::to_string(p.pages) + " pages of " +
           std::to_string(p.page_size) + " tokens has more";
  }
  if (p.plan.parts < 1 || p.page_size < 1 || p.max_q_len < 1) {
    return "jax_mla: mla_decode has a plan of " + std::to_string(p.plan.parts) + " parts, pages of " +
           std::to_string(p.page_size) + " tokens and max_q_len " + std::to_string(p.max_q_len) +
           "; each must be positive";
  }
  return {};
}

}  // namespace

Error decode(const DecodeParams& params, const Device& device) {
  if (int64_t{params.tokens} * params.heads == 0) return {};
  Error error = check(params);
  if (!error.empty()) return error;
  int32_t shared_limit = 0, major = 0;
  error = device_attribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error.empty()) error = device_attribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (!error.empty()) return error;
  switch (params.q_dtype) {
    case DType::kBF16: error = decode_generic_bf16(params, device, shared_limit); break;
    case DType::kF16: error = decode_generic_f16(params, device, shared_limit); break;
    default: error = std::string("jax_mla: mla_decode on CUDA has no kernel for ") + name_of(params.q_dtype);
  }
  if (!error.empty()) return error;
  return reduce(params, device, /*dependent=*/major >= 9);
}

}  // namespace mla
