// Latent values as fp8_ds_mla holds them.
#pragma once

#include "kernels/cache/ds_mla_scale.h"
#include "kernels/cuda/rows.cuh"
#include "kernels/group.h"
#include "kernels/params.h"

namespace mla {

// The largest finite magnitude of a group, as bits: they are ordered as the values are.
template <class Element, int kCount>
__device__ __forceinline__ uint32_t largest_finite(const GroupBits<Element, kCount>& group) {
  constexpr int kBits = 8 * sizeof(Element), kPerWord = 4 / sizeof(Element);
  constexpr uint32_t kMagnitude = 0xFFFFFFFFu >> (33 - kBits);
  constexpr uint32_t kInfinity = std::is_same_v<Element, float>           ? 0x7F800000
                                 : std::is_same_v<Element, __nv_bfloat16> ? 0x7F80
                                                                          : 0x7C00;
  uint32_t largest = 0;
  if constexpr (kPerWord == 2) {  // two at a time, as if all were finite
#pragma unroll
    for (uint32_t pair : group.words) largest = __vmaxu2(largest, pair & (kMagnitude << 16 | kMagnitude));
    largest = max(largest >> 16, largest & 0xFFFF);
    if (largest < kInfinity) return largest;
    largest = 0;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t magnitude = group.words[i / kPerWord] >> (i % kPerWord * kBits) & kMagnitude;
    if (magnitude < kInfinity) largest = max(largest, magnitude);
  }
  return largest;
}

// The scales of 128 values each, of which neighbouring lanes have a group each, in kSteps steps: every lane works out
// one, and its reciprocal, and hands them to those that need them.
template <int kLanes, int kSteps>
class DsMlaScales {
 public:
  static_assert(kSteps <= kLanes);

  template <class Element, int kCount>
  __device__ __forceinline__ DsMlaScales(const GroupBits<Element, kCount> (&groups)[kSteps], bool power_of_two) {
    static_assert(kLanes == kDsMlaGroup / kCount);
    uint32_t own = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t largest = largest_finite(groups[step]);
#pragma unroll
      for (int distance = 1; distance < kLanes; distance *= 2) {
        largest = max(largest, __shfl_xor_sync(kWholeWave, largest, distance));
      }
      if (own_step() == step) own = largest;
    }
    const GroupBits<Element, 4 / sizeof(Element)> lone{{own}};
    scale_ = ds_mla_scale(element_at(lone, 0), power_of_two);
    reciprocal_ = 1.0f / scale_;
  }

  // The step whose scale this lane has; lanes past the last step have one that another lane has too.
  static __device__ __forceinline__ int own_step() { return threadIdx.x % kLanes % kSteps; }
  static __device__ __forceinline__ bool is_first_with_it() { return threadIdx.x % kLanes < kSteps; }
  __device__ __forceinline__ float own_scale() const { return scale_; }

  __device__ __forceinline__ float scale(int step) const { return __shfl_sync(kWholeWave, scale_, lane_with(step)); }
  __device__ __forceinline__ float reciprocal(int step) const {
    return __shfl_sync(kWholeWave, reciprocal_, lane_with(step));
  }

 private:
  static __device__ __forceinline__ int lane_with(int step) { return threadIdx.x % kWarp / kLanes * kLanes + step; }

  float scale_, reciprocal_;
};

// value / scale by Markstein's theorem, as Divisor in kernels/group.h; by what a scale and its values are, in fewer
// instructions: no finite quotient is past 448, and a remainder underflows only where the code is 0. The remainder's
// sign is such that a -0 stays one, and what is not finite becomes NaN.
template <class Element, int kCount>
__device__ __forceinline__ GroupBits<E4M3FN, kCount> ds_mla_codes(const GroupBits<Element, kCount>& group, float scale,
                                                                  float reciprocal) {
  float x[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float value = element_at(group, i), quotient = value * reciprocal;
    const float excess = fmaf(quotient, scale, -value);
    x[i] = fmaf(-excess, reciprocal, quotient);
  }
  return from_floats<E4M3FN>(x, /*saturate=*/true);
}

}  // namespace mla
