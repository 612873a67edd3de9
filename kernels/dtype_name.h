// Names of the element types: JAX's, for messages, and short ones, for the names of kernels.
#pragma once

#include "kernels/params.h"

namespace mla {

inline const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "float32";
    case DType::kBF16: return "bfloat16";
    case DType::kF16: return "float16";
    case DType::kE4M3FN: return "float8_e4m3fn";
    case DType::kE4M3FNUZ: return "float8_e4m3fnuz";
  }
  return "an unknown dtype";
}

inline const char* short_name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kBF16: return "bf16";
    case DType::kF16: return "f16";
    case DType::kE4M3FN: return "e4m3fn";
    case DType::kE4M3FNUZ: return "e4m3fnuz";
  }
  return "unknown";
}

}  // namespace mla
