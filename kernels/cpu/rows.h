// Row operations that only move and convert numbers: for the cache, packing and merging.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace mla::cpu {

struct Conversion {
  float multiply = 1.0f;  // the source's scale
  float divide = 1.0f;    // the target's scale
  bool saturate = false;  // fp8 targets: clamp to the largest finite value
};

// target[i] = cast(float(source[i]) * multiply / divide) for i < n; n is a multiple of 16.
using ConvertRow = void (*)(void* target, const void* source, int64_t n, const Conversion& conversion);

// out[i] = a[i] * weight_a + b[i] * weight_b for i < n. What weighs 0 is not read.
using WeighRows = void (*)(void* out, const void* a, float weight_a, const void* b, float weight_b, int64_t n);

// One instruction set's.
struct RowKernels {
  ConvertRow (*convert)(DType target, DType source);
  WeighRows (*weigh)(DType type);
};

extern const RowKernels kPortableRows;
#if defined(__x86_64__)
extern const RowKernels kAvx2Rows;
#endif

// The best that this machine runs.
const RowKernels& row_kernels();

int64_t size_of(DType type);

}  // namespace mla::cpu
