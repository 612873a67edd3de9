// Rows converted from one dtype to another.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace mla::cpu {

struct Conversion {
  float multiply = 1.0f;  // the source's scale
  float divide = 1.0f;    // the target's scale
  bool saturate = false;  // fp8 targets: clamp to the largest finite value
};

// target[i] = cast(float(source[i]) * multiply / divide) for i < n; n is a multiple of 4.
using ConvertRow = void (*)(void* target, const void* source, int64_t n, const Conversion& conversion);

ConvertRow convert_row(DType target, DType source);

int64_t size_of(DType type);

}  // namespace mla::cpu
