// Tensor maps, which tell the copy engine where an array lies and what it fetches at once.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <initializer_list>

#include "kernels/entry.h"

namespace mla {

struct TensorAxis {
  int64_t size;
  int64_t stride;  // in bytes, a multiple of 16; of the first axis, which has no gaps, not read
  int32_t box;     // elements fetched along it at once
};

// An array of `dtype` (bf16, fp16 or e4m3fn) at `data`, the innermost axis first, of 128 or 64 bytes a box; boxes land
// in shared memory without gaps, in lines of that length. Lines of 128 bytes are swizzled as kernels/cuda/wgmma.cuh
// says; of those of 64, chunk c of 16 bytes of line r lies at c ^ (r / 2 % 4).
Error encode_tensor_map(CUtensorMap* map, const char* name, const void* data, DType dtype,
                        std::initializer_list<TensorAxis> axes);

}  // namespace mla
