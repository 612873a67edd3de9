// clear_values of sm90/clear.cuh, over a block that one warpgroup clears.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/decode/sm90/wide/shape.h"

namespace mla::sm90::wide {

template <class Element>
__device__ __forceinline__ void clear_values(uint32_t block, int32_t hidden, int32_t unused) {
  constexpr int kVectors = kLatentChunks * kLineBytes / 16;  // of a token
  hidden = max_of(hidden, 0);
  const int32_t vectors = (kBlockTokens - hidden) * kVectors;
#pragma unroll 1
  for (int i = threadIdx.x % kGroupThreads; i < vectors; i += kGroupThreads) {
    const int32_t token = hidden + i / kVectors, vector = i % kVectors;
    const uint32_t address = block + vector / 8 * kChunkBytes + token * kLineBytes + vector % 8 * 16;
    uint4 value{};
    if (token < unused) {
      value = ptx::load_shared_16(address);
      value = {finite<Element>(value.x), finite<Element>(value.y), finite<Element>(value.z), finite<Element>(value.w)};
    }
    ptx::store_shared_16(address, value);
  }
}

}  // namespace mla::sm90::wide
