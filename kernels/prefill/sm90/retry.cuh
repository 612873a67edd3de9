// Values are multiplied as they are, those of keys that some query does not see too: a weight of 0 silences whatever is
// finite. What is not finite shows in a sum of every row of the tile, since 0 times it is NaN. A warp that finds such a
// sum writes nothing, and the tile comes once more, with values cleared.
#pragma once

#include "kernels/cuda/lanes.cuh"
#include "kernels/prefill/rows.cuh"
#include "kernels/prefill/sm90/shape.h"

namespace mla::sm90_prefill {

// Whether a sum of any of the warp's rows that exist is not finite. `row`: of the tile, this lane's upper one.
__device__ __forceinline__ bool has_nonfinite_sum(const Tile& tile, int row, const prefill_rows::Output& out) {
  float zeros[2] = {0, 0};  // and NaN where a sum is not finite
#pragma unroll
  for (int i = 0; i < kNope / 2; ++i) zeros[i % 4 / 2] = fmaf(out[i], 0, zeros[i % 4 / 2]);
  return __any_sync(0xFFFFFFFF, (row < tile.rows && zeros[0] != 0) || (row + 8 < tile.rows && zeros[1] != 0));
}

// Whether the attending warp `warp` has to write its rows now.
__device__ __forceinline__ bool is_writing(const Tile& tile, int warp, int row, const prefill_rows::Output& out) {
  const uint32_t careful = __shfl_sync(0xFFFFFFFF, tile.careful, 0);
  return careful == 0 ? !has_nonfinite_sum(tile, row, out) : (careful >> warp & 1) != 0;
}

// The warp's bits, which nobody else writes.
__device__ __forceinline__ void forget_retries(uint32_t (&retries)[kRetryWords]) {
  for (int i = threadIdx.x % 32; i < kRetryWords; i += 32) retries[i] = 0;
  __syncwarp();
}

__device__ __forceinline__ void note_retry(const Tile& tile, uint32_t (&retries)[kRetryWords]) {
  retries[tile.round / 32] |= 1u << tile.round % 32;
}

// The schedule to the next round whose tile has to come again. False: there is none.
__device__ __forceinline__ bool next_retry(Control& control) {
  const uint32_t lane = threadIdx.x % 32, end = control.progress.retry_end;
  uint32_t round = control.progress.round, warps = 0;
#pragma unroll 1
  for (; round < end; ++round) {
    const uint32_t bits = lane < kAttendWarps ? control.retries[lane][round / 32] : 0;
    warps = __ballot_sync(0xFFFFFFFF, bits >> round % 32 & 1);
    if (warps != 0) break;
    if (!__any_sync(0xFFFFFFFF, bits != 0)) round |= 31;
  }
  __syncwarp();
  if (lane == 0) {
    control.progress.round = round;
    control.progress.retried = warps;
  }
  __syncwarp();
  return warps != 0;
}

}  // namespace mla::sm90_prefill
