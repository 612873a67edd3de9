// How a warp goes through rows: by groups of neighbouring elements, one a lane and step, all of a few rows' loads
// before the first store. What depends on a row is found by the lanes that belong to it, and handed to the others.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

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

// The address that lane `from` has.
template <class T>
__device__ __forceinline__ T* shuffle_address(T* address, int from) {
  const auto bits = reinterpret_cast<uint64_t>(address);
  const uint32_t low = __shfl_sync(0xFFFFFFFF, static_cast<uint32_t>(bits), from);
  const uint32_t high = __shfl_sync(0xFFFFFFFF, static_cast<uint32_t>(bits >> 32), from);
  return reinterpret_cast<T*>(uint64_t{high} << 32 | low);
}

// The address of a row, of kRows that a warp has: kWarp / kRows lanes hold that of each.
template <int kRows, class T>
__device__ __forceinline__ T* address_of_row(T* address, int row) {
  if constexpr (kRows == 1) return address;
  return shuffle_address(address, row * (kWarp / kRows));
}

}  // namespace mla
