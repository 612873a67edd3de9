// Which pairs of dtypes have kernels, and what the kernels' sources and functions are named after.
#pragma once

#include <string>

#include "kernels/params.h"

namespace mla::gfx9 {

inline bool is_fp8(DType dtype) { return dtype == DType::kE4M3FN || dtype == DType::kE4M3FNUZ; }

// The 8-bit type whose instructions an architecture has.
inline DType own_fp8(const std::string& architecture) {
  return architecture == "gfx942" ? DType::kE4M3FNUZ : DType::kE4M3FN;
}

// Null: no kernel.
inline const char* instance_of(DType q, DType cache, bool ds_mla, const std::string& architecture) {
  if (ds_mla) return q == DType::kBF16 && cache == DType::kE4M3FN ? "bf16_ds_mla" : nullptr;
  if (is_fp8(cache)) {
    if (cache != own_fp8(architecture)) return nullptr;
    if (q == cache) return "fp8";
    return q == DType::kBF16 ? "bf16_fp8" : q == DType::kF16 ? "f16_fp8" : nullptr;
  }
  if (q != cache) return nullptr;
  return q == DType::kBF16 ? "bf16" : q == DType::kF16 ? "f16" : nullptr;
}

}  // namespace mla::gfx9
