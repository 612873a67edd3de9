// A token's row in a cache, as the CUDA kernels that fill and read caches go through it.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/params.h"

namespace mla {

// fp8_ds_mla: 512 values in e4m3fn, a scale for each 128 of them, 64 rope values in bf16.
struct DsMla {};

template <class Stored>
struct CacheLayout {
  using Latent = Stored;
  using Rope = Stored;
  static constexpr int64_t kRowBytes = kWidth * sizeof(Stored);
  static constexpr int kRopeByte = kLatent * sizeof(Stored);
};

template <>
struct CacheLayout<DsMla> {
  using Latent = E4M3FN;
  using Rope = __nv_bfloat16;
  static constexpr int64_t kRowBytes = kDsMlaBytes;
  static constexpr int kRopeByte = kDsMlaBytes - kRope * 2;
};

}  // namespace mla
