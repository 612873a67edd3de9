// What mla_decode's entries refuse on every GPU, whatever kernels they have.
#pragma once

#include <limits>
#include <string>

#include "kernels/capability.h"
#include "kernels/dtype_name.h"
#include "kernels/entry.h"

namespace mla {

inline std::string cache_name(const DecodeParams& p) { return p.ds_mla ? "fp8_ds_mla" : name_of(p.cache_dtype); }

inline Error check_decode(const DecodeParams& p) {
  const auto is_fp8 = [](DType dtype) { return dtype == DType::kE4M3FN || dtype == DType::kE4M3FNUZ; };
  const auto known = static_cast<int32_t>(variants().size());
  if (p.variant < 0 || p.variant > known) {
    return "jax_mla: mla_decode's variant is " + std::to_string(p.variant) + ", this module has " +
           std::to_string(known);
  }
  const DType out_dtype = is_fp8(p.q_dtype) ? DType::kBF16 : p.q_dtype;
  if (p.out_dtype != out_dtype) {
    return std::string("jax_mla: mla_decode with q in ") + name_of(p.q_dtype) + " writes " + name_of(out_dtype) +
           ", out is " + name_of(p.out_dtype);
  }
  if ((p.q_scale != nullptr && !is_fp8(p.q_dtype)) || (p.k_scale != nullptr && (!is_fp8(p.cache_dtype) || p.ds_mla))) {
    return std::string("jax_mla: q_scale and k_scale belong to fp8, this mla_decode has q in ") + name_of(p.q_dtype) +
           " over a cache in " + cache_name(p);
  }
  if (p.k_scale != nullptr && p.k_scales != 1 && p.k_scales != p.layers) {
    return "jax_mla: mla_decode has " + std::to_string(p.k_scales) + " k_scales, expected 1 or one for each of " +
           std::to_string(p.layers) + " layers";
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

}  // namespace mla
