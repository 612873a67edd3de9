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

// --- All lanes of a wave take part.
constexpr uint32_t kWholeWave = 0xFFFFFFFF;
using LaneMask = uint32_t;
__device__ __forceinline__ LaneMask ballot(bool predicate) { return __ballot_sync(kWholeWave, predicate); }
__device__ __forceinline__ int first_lane(LaneMask lanes) { return __ffs(lanes) - 1; }
__device__ __forceinline__ bool any_lane(bool predicate) { return __any_sync(kWholeWave, predicate); }
__device__ __forceinline__ int32_t wave_sum(int32_t value) { return __reduce_add_sync(kWholeWave, value); }
__device__ __forceinline__ int32_t wave_max(int32_t value) { return __reduce_max_sync(kWholeWave, value); }
__device__ __forceinline__ int32_t wave_min(int32_t value) { return __reduce_min_sync(kWholeWave, value); }
// From `distance` lanes below; the lowest ones keep their own.
__device__ __forceinline__ int32_t shuffle_up(int32_t value, int distance) {
  return __shfl_up_sync(kWholeWave, value, distance);
}
// What a lane wrote to shared memory is seen by the wave's others.
__device__ __forceinline__ void wave_barrier() { __syncwarp(); }

using I32x4 = int4;
__device__ __forceinline__ I32x4 i32x4(int32_t x, int32_t y, int32_t z, int32_t w) { return make_int4(x, y, z, w); }

}  // namespace mla

#endif
