// Values of tokens that some row must not see: what a weight of 0 does not silence is overwritten in shared memory.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/decode/sm90/shape.h"

namespace mla::sm90 {

// Values that a weight of 0 would not silence. Tokens from `unused` on may be NaN: zeros. Those from `hidden` on are
// not seen by all rows: zeros for what is not finite. (A row that sees such a token has a NaN among its scores, and so
// in its sum of weights.)
template <class Element, class Shape>
__device__ __forceinline__ void clear_values(uint32_t ring, const Ring<Shape>& block, int32_t hidden, int32_t unused) {
  constexpr int kVectors = kLineBytes / 16;
  hidden = max_of(hidden, 0);
  const int32_t vectors = (kBlockTokens - hidden) * kVectors;
#pragma unroll 1
  for (int c = 0; c < kLatentChunks; ++c) {
    const uint32_t chunk = ring + block.slot_after(c / kSlotChunks) * kSlotBytes + (c % kSlotChunks) * kChunkBytes;
#pragma unroll 1
    for (int i = threadIdx.x % kGroupThreads; i < vectors; i += kGroupThreads) {
      const uint32_t address = chunk + hidden * kLineBytes + i * 16;
      uint4 value{};
      if (hidden + i / kVectors < unused) {
        value = ptx::load_shared_16(address);
        value = {finite<Element>(value.x), finite<Element>(value.y), finite<Element>(value.z),
                 finite<Element>(value.w)};
      }
      ptx::store_shared_16(address, value);
    }
  }
}

}  // namespace mla::sm90
