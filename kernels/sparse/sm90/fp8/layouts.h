// How fp8 caches lie in memory, and in the shared memory of the Hopper sparse kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/params.h"

namespace mla::sparse_sm90::fp8 {

// A token is one copy of kTokenBytes; kStride: from one to the next in shared memory, an odd
// number of 16 bytes, so that ldmatrix, which reads 16 bytes of eight tokens, meets every bank once.
struct PerTensor {
  static constexpr int kTokenBytes = kWidth;
  static constexpr int kStride = kTokenBytes + 16;
  static constexpr int kScales = 0;  // of a token
  using RopeElement = __half;        // e4m3, expanded like the latent
};
struct DsMla {
  static constexpr int kTokenBytes = kDsMlaBytes;
  static constexpr int kStride = kTokenBytes;
  static constexpr int kScales = kLatent / kDsMlaGroup;
  static constexpr int kScaleOffset = kLatent;  // in a token: four fp32, then 64 bf16
  static constexpr int kRopeOffset = kScaleOffset + kScales * 4;
  using RopeElement = __nv_bfloat16;
};
static_assert(PerTensor::kStride / 16 % 2 == 1 && DsMla::kStride / 16 % 2 == 1);

}  // namespace mla::sparse_sm90::fp8
