// The output of narrow tiles, in fp8 or 16 bits, when the references of the softmax have moved.
#pragma once

#include <cuda_runtime.h>

namespace mla::sm90 {

// `rescale`: a factor for each row; lane 4 * g + t has rows 8j + 2t and 8j + 2t + 1 in [4j], [4j + 2] and [4j + 1],
// [4j + 3] of each chunk.
template <int kChunks, int kSums>
__device__ __forceinline__ void rescale_output(const float* rescale, float (&out)[kChunks][kSums]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    const float2 factor = *reinterpret_cast<const float2*>(rescale + j * 8 + 2 * t);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      out[i][4 * j] *= factor.x;
      out[i][4 * j + 1] *= factor.y;
      out[i][4 * j + 2] *= factor.x;
      out[i][4 * j + 3] *= factor.y;
    }
  }
}

}  // namespace mla::sm90
