// merge_states' kernel, for CUDA and HIP.
#pragma once

#include "kernels/gpu.h"
#include "kernels/params.h"

namespace mla {

// How the two sides add up: out = weight_a * out_a + weight_b * out_b. A side of weight 0 is not read.
struct Weights {
  float a, b;
  float lse;
};

__device__ __forceinline__ Weights weigh(float lse_a, float lse_b) {
  const bool has_a = isfinite(lse_a), has_b = isfinite(lse_b);
  if (!has_a && !has_b) return {0, 0, -INFINITY};
  if (!has_b) return {1, 0, lse_a};
  if (!has_a) return {0, 1, lse_b};
  const float highest = fmaxf(lse_a, lse_b);
  const float a = expf(lse_a - highest), b = expf(lse_b - highest), sum = a + b;
  return {a / sum, b / sum, highest + logf(sum)};
}

// A block is a few rows, of blockDim.x threads each.
template <class Element, int kCount>
__device__ __forceinline__ void merge_rows(const MergeStatesParams& p) {
  using Group = Vector<Element, kCount>;
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= p.rows) return;
  const Weights weights = weigh(p.lse_a[row], p.lse_b[row]);
  const int32_t groups = p.width / kCount;
  const Group* out_a = static_cast<const Group*>(p.out_a) + row * groups;
  const Group* out_b = static_cast<const Group*>(p.out_b) + row * groups;
  Group* out = static_cast<Group*>(p.out) + row * groups;
  for (int32_t i = threadIdx.x; i < groups; i += blockDim.x) {
    Group a{}, b{}, merged;
    if (weights.a != 0) a = out_a[i];
    if (weights.b != 0) b = out_b[i];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      merged.at[k] = from_float<Element>(weights.a * to_float(a.at[k]) + weights.b * to_float(b.at[k]));
    }
    out[i] = merged;
  }
  if (threadIdx.x == 0) p.lse[row] = weights.lse;
}

}  // namespace mla
