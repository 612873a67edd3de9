// A token as fp8_ds_mla, by a wave: each lane has as many neighbouring latent columns, and as many of
// the rope key.
#pragma once

#include "kernels/cache/ds_mla_scale.h"
#include "kernels/params.h"
#include "kernels/rocm/device.h"

namespace mla {

// `row`: the token's 656 bytes. What is not finite is stored as NaN and has no part in its scale.
template <class Element>
__device__ __forceinline__ void store_ds_mla(const Element* latent, const Element* rope, bool power_of_two,
                                             unsigned char* row) {
  constexpr int kLanes = kWave, kColumns = kLatent / kLanes, kRopeColumns = kRope / kLanes;
  constexpr int kScaleLanes = kDsMlaGroup / kColumns;  // that share a scale
  constexpr int kCount = 16 / sizeof(Element);         // elements in one access
  const int lane = threadIdx.x % kLanes;

  float values[kColumns], largest = 0;
#pragma unroll
  for (int i = 0; i < kColumns / kCount; ++i) {
    const auto read = reinterpret_cast<const Vector<Element, kCount>*>(latent)[lane * (kColumns / kCount) + i];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float x = to_float(read.at[k]), magnitude = fabsf(x);
      values[i * kCount + k] = x;
      if (magnitude < INFINITY) largest = fmaxf(largest, magnitude);
    }
  }
#pragma unroll
  for (int distance = 1; distance < kScaleLanes; distance *= 2) {
    largest = fmaxf(largest, shuffle_xor(largest, distance));
  }
  const float scale = ds_mla_scale(largest, power_of_two);
  Vector<uint8_t, kColumns> codes;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) codes.at[i] = e4m3fn_bits(values[i] / scale, /*saturate=*/false);
  reinterpret_cast<Vector<uint8_t, kColumns>*>(row)[lane] = codes;
  if (lane % kScaleLanes == 0) reinterpret_cast<float*>(row + kLatent)[lane / kScaleLanes] = scale;

  const auto pair = reinterpret_cast<const Vector<Element, kRopeColumns>*>(rope)[lane];
  Vector<BF16, kRopeColumns> stored;
#pragma unroll
  for (int i = 0; i < kRopeColumns; ++i) {
    if constexpr (std::is_same_v<Element, BF16>) {
      stored.at[i] = pair.at[i];
    } else {
      stored.at[i] = from_float<BF16>(to_float(pair.at[i]));
    }
  }
  reinterpret_cast<Vector<BF16, kRopeColumns>*>(row + kDsMlaBytes - kRope * 2)[lane] = stored;
}

}  // namespace mla
