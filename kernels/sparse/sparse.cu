// mla_sparse_decode's entry on CUDA: picks the kernel for the cache, launches it and then the reduction.
#include <limits>
#include <string>

#include "kernels/capability.h"
#include "kernels/cuda/launch.h"
#include "kernels/sparse/generic/instance.h"
#include "kernels/sparse/reduce.h"
#include "kernels/sparse/sm90/limits.h"
#include "kernels/sparse/sm90/sparse.h"

namespace mla {
namespace {

Error check(const SparseDecodeParams& p) {
  const auto known = static_cast<int32_t>(variants().size());
  if (p.variant < 0 || p.variant > known) {
    return "jax_mla: mla_sparse_decode's variant is " + std::to_string(p.variant) + ", this module has " +
           std::to_string(known);
  }
  const bool float_queries = p.q_dtype == DType::kBF16 || p.q_dtype == DType::kF16;
  const bool fp8_queries = p.q_dtype == DType::kE4M3FN, fp8_cache = p.cache_dtype == DType::kE4M3FN && !p.ds_mla;
  const bool fits =
      p.ds_mla ? p.q_dtype == DType::kBF16
               : (float_queries && p.cache_dtype == p.q_dtype) || (fp8_cache && (float_queries || fp8_queries));
  if (!fits) {
    return std::string(
               "jax_mla: mla_sparse_decode on CUDA takes bfloat16 or float16 queries over a cache of the same or of "
               "float8_e4m3fn, both in float8_e4m3fn, or bfloat16 over fp8_ds_mla; these are ") +
           name_of(p.q_dtype) + " over " + (p.ds_mla ? "fp8_ds_mla" : name_of(p.cache_dtype));
  }
  const DType out_dtype = fp8_queries ? DType::kBF16 : p.q_dtype;
  if (p.out_dtype != out_dtype) {
    return std::string("jax_mla: mla_sparse_decode with q in ") + name_of(p.q_dtype) + " writes " + name_of(out_dtype) +
           ", out is " + name_of(p.out_dtype);
  }
  if ((p.q_scale != nullptr && !fp8_queries) || (p.k_scale != nullptr && !fp8_cache)) {
    return "jax_mla: q_scale and k_scale of mla_sparse_decode belong to fp8 queries and per-tensor fp8 caches";
  }
  if (p.splits < 1 || p.tile_rows < 1 || p.topk < 0 || p.slots < 0) {
    return "jax_mla: mla_sparse_decode has " + std::to_string(p.splits) + " splits and tiles of " +
           std::to_string(p.tile_rows) + " heads; each must be positive";
  }
  return {};
}

Error attend(const SparseDecodeParams& p, const Device& device, bool hopper) {
  const std::string variant = p.variant == 0 ? "" : variants()[p.variant - 1];
#if defined(JAX_MLA_SM90)
  if (variant != "generic" && hopper && sparse_sm90::takes(p)) return sparse_sm90_decode(p, device);
#endif
  if (variant == "sm90") {
    return "jax_mla: mla_sparse_decode's Hopper kernels take 8, 16, .. 48 or 64 heads a tile (of fp8_ds_mla not 48) on "
           "compute capability 9.0; this call has " +
           std::to_string(p.tile_rows) + (hopper ? "" : ", on another device");
  }
  int32_t shared_limit = 0;
  const Error error = device_attribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (!error.empty()) return error;
  if (p.ds_mla) return sparse_generic_ds_mla(p, device, shared_limit);
  switch (p.cache_dtype) {
    case DType::kBF16: return sparse_generic_bf16(p, device, shared_limit);
    case DType::kF16: return sparse_generic_f16(p, device, shared_limit);
    default: return sparse_generic_e4m3fn(p, device, shared_limit);
  }
}

}  // namespace

Error sparse_decode(const SparseDecodeParams& params, const Device& device) {
  if (int64_t{params.tokens} * params.heads == 0) return {};
  Error error = check(params);
  int32_t major = 0, minor = 0;
  if (error.empty()) error = device_attribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error.empty()) error = device_attribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error.empty()) error = attend(params, device, major == 9 && minor == 0);
  if (!error.empty() || params.splits == 1) return error;
  return sparse_reduce(params, device, /*dependent=*/major >= 9);
}

}  // namespace mla
