// How a warp goes through rows: by groups of neighbouring elements, one a lane and step, all loads before the first
// store.
#pragma once

#include <cuda_runtime.h>

namespace mla {

constexpr int kWarp = 32;

// Rows of kGroups groups each, a power of two, in consecutive steps of a warp.
template <int kGroups>
struct RowSteps {
  static constexpr int kRowsAStep = kGroups < kWarp ? kWarp / kGroups : 1;
  static constexpr int kStepsARow = kGroups < kWarp ? 1 : kGroups / kWarp;
  static_assert(kRowsAStep * kGroups == kStepsARow * kWarp);

  static __device__ __forceinline__ int row(int step, int lane) {
    return step / kStepsARow * kRowsAStep + (kRowsAStep == 1 ? 0 : lane / kGroups);
  }
  static __device__ __forceinline__ int group(int step, int lane) {
    return kRowsAStep == 1 ? step % kStepsARow * kWarp + lane : lane % kGroups;
  }
};

}  // namespace mla
