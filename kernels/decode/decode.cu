// mla_decode's entry on CUDA: picks the kernel for the call, launches it and then the reduction.
#include <algorithm>
#include <string>
#include <vector>

#include "kernels/capability.h"
#include "kernels/cuda/launch.h"
#include "kernels/decode/check.h"
#include "kernels/decode/generic/instance.h"
#include "kernels/decode/reduce.h"
#include "kernels/decode/sm90/decode.h"
#include "kernels/decode/sm90/fp8/decode.h"
#include "kernels/decode/sm90/fp8/limits.h"
#include "kernels/decode/sm90/limits.h"

namespace mla {
namespace {

Error check_dtypes(const DecodeParams& p) {
  const bool float_queries = p.q_dtype == DType::kBF16 || p.q_dtype == DType::kF16;
  const bool fp8_queries = p.q_dtype == DType::kE4M3FN;
  const bool fp8_cache = p.cache_dtype == DType::kE4M3FN && !p.ds_mla;
  const bool fits =
      p.ds_mla ? p.q_dtype == DType::kBF16
               : (float_queries && p.cache_dtype == p.q_dtype) || (fp8_cache && (float_queries || fp8_queries));
  if (fits) return {};
  return std::string(
             "jax_mla: mla_decode on CUDA takes bfloat16 or float16 queries over a cache of the same or of "
             "float8_e4m3fn, both in float8_e4m3fn, or bfloat16 over fp8_ds_mla; these are ") +
         name_of(p.q_dtype) + " over " + cache_name(p);
}

bool serves(const std::string& architecture, int32_t compute_capability) {  // "sm_90", "sm_80+"
  const bool later = architecture.back() == '+';
  const int32_t least = std::stoi(architecture.substr(3));
  return later ? compute_capability >= least : compute_capability == least;
}

// The variant of the first capability row that takes the call, as Python chooses it. A plan may have been made for
// another kernel's tiles: then it is the generic one, which takes them all.
std::string best_variant(const DecodeParams& p, int32_t compute_capability) {
  static const std::vector<Capability> kRows = capabilities();
  for (const Capability& row : kRows) {
    if (row.operation != std::string("mla_decode") || !serves(row.architecture, compute_capability)) continue;
    if (row.q_dtype != std::string(name_of(p.q_dtype)) || row.cache_dtype != cache_name(p)) {
      continue;
    }
    const auto takes_pages = [&](const Range& range) { return contains(range, p.page_size); };
    const std::vector<int32_t>& sizes = row.tile_rows;
    const std::vector<Range>& pages = row.page_sizes;
    if (std::find(sizes.begin(), sizes.end(), p.plan.tile_rows) == sizes.end()) continue;
    if (pages.empty() || std::any_of(pages.begin(), pages.end(), takes_pages)) return row.variant;
  }
  return "generic";
}

Error decode_attention(const DecodeParams& p, const Device& device, int32_t compute_capability) {
  const bool hopper = compute_capability == 90;
  const std::string variant = p.variant == 0 ? best_variant(p, compute_capability) : variants()[p.variant - 1];
#if defined(JAX_MLA_SM90)
  if (variant == "sm90" && hopper && sm90::takes(p)) return decode_sm90(p, device);
  if (variant == "sm90" && hopper && sm90::fp8::takes(p)) return decode_sm90_fp8(p, device);
#endif
  if (variant == "sm90") {
    return "jax_mla: mla_decode's Hopper kernels take plans of 8, 16, .. 48 or 64 rows a tile on compute capability "
           "9.0: "
           "bfloat16 or float16 over a cache of the same and pages of 16, 32 or a multiple of 64 tokens, or those and "
           "float8_e4m3fn over float8_e4m3fn and pages of a multiple of 8 tokens; this call has " +
           std::to_string(p.plan.tile_rows) + " rows, pages of " + std::to_string(p.page_size) + " and " +
           name_of(p.q_dtype) + " over " + cache_name(p) + (hopper ? "" : ", on another device");
  }
  int32_t shared_limit = 0;
  const Error error = device_attribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (!error.empty()) return error;
  return decode_generic(p, device, shared_limit);
}

}  // namespace

Error decode(const DecodeParams& params, const Device& device) {
  if (int64_t{params.tokens} * params.heads == 0) return {};
  Error error = check_dtypes(params);
  if (error.empty()) error = check_decode(params);
  if (!error.empty()) return error;
  int32_t major = 0, minor = 0;
  error = device_attribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error.empty()) error = device_attribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error.empty()) error = decode_attention(params, device, major * 10 + minor);
  if (!error.empty()) return error;
  return reduce(params, device, /*dependent=*/major >= 9);
}

}  // namespace mla
