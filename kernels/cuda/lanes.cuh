// Combining values over the lanes that share a row or a column of wgmma's D, where a lane is 4 * g + t.
#pragma once

#include "kernels/cuda/ptx.cuh"

namespace mla {

// Of lanes that differ in g.
template <class Combine>
__device__ __forceinline__ float combine_over_g(float value, Combine combine) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    value = combine(value, __shfl_xor_sync(0xFFFFFFFF, value, distance));
  }
  return value;
}

// Of lanes that differ in t.
template <class Combine>
__device__ __forceinline__ float combine_over_t(float value, Combine combine) {
  value = combine(value, __shfl_xor_sync(0xFFFFFFFF, value, 1));
  return combine(value, __shfl_xor_sync(0xFFFFFFFF, value, 2));
}

}  // namespace mla
