// What the kernels of pack_kv share, for CUDA and HIP.
#pragma once

#include "kernels/group.h"
#include "kernels/params.h"

namespace mla {

constexpr int kPackThreads = 256;
constexpr int kUpWidth = 2 * kNope;

__device__ __forceinline__ float scale_of(const float* scale) { return scale == nullptr ? 1.0f : *scale; }

}  // namespace mla
