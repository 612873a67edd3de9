// What kernels that CUDA and HIP share are written in: CUDA's names for places in the grid, barriers and mathematics,
// the element types with to_float and from_float, and how many lanes run together.
#pragma once

#if defined(__HIP__)

#include "kernels/rocm/device.h"

#else

#include "kernels/cuda/element.cuh"

namespace mla {

constexpr int kWave = 32;
using BF16 = __nv_bfloat16;
using F16 = __half;

// What no thread writes while the kernel runs.
template <class T>
__device__ __forceinline__ T read_only(const T* source) {
  return __ldg(source);
}

// To an 8-bit type: past its largest finite value NaN, or that value if `saturate`.
template <class Element>
__device__ __forceinline__ Element from_float(float x, bool saturate) {
  if constexpr (std::is_same_v<Element, E4M3FN>) {
    return {e4m3fn_bits(x, saturate)};
  } else {
    static_assert(std::is_same_v<Element, E4M3FNUZ>);
    return {e4m3fnuz_bits(x, saturate)};
  }
}

// All lanes of a wave ask.
__device__ __forceinline__ bool any_lane(bool predicate) { return __any_sync(0xFFFFFFFF, predicate); }

}  // namespace mla

#endif
