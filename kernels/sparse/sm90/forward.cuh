// Two CTAs that attend to the same tokens, each for 64 of a query token's heads: each brings half of the tokens from
// the cache, and hands them on to the other one through distributed shared memory. So a token leaves the L2 once for
// both.
#pragma once

#include "kernels/cuda/cluster.cuh"
#include "kernels/sparse/sm90/shape.h"

namespace mla::sparse_sm90 {

// By one thread.
__device__ __forceinline__ void init_halves(PairControl& control) {
  constexpr uint32_t kKeyThreads = 32 * Wide<2>::kKeyWarps;
  for (int slot = 0; slot < sm90::wide::kSlots; ++slot) {
    // With the rope keys, a block's first chunk, comes whether the block is the last of its item.
    const bool rope = slot % sm90::kChunks == sm90::wide::kRopeChunk;
    ptx::mbarrier_init(ptx::shared_address(&control.half[slot]), kKeyThreads + (rope ? 1 : 0));
  }
}

// By one warp, chunk after chunk. A place is free in both CTAs when the key warps have filled their half of it here,
// since they wait for both; and a chunk is full when the other's half has come too.
__device__ __forceinline__ void forward_tokens(const SparseDecodeParams& p, uint32_t ring, PairControl& control) {
  constexpr uint32_t kHalfBytes = sm90::kChunkBytes / 2;
  const uint32_t rank = blockIdx.x % 2, half = ptx::shared_address(control.half),
                 full = ptx::shared_address(control.full);
  uint32_t number = 0;  // of the block

  SparseItems items(p);
  while (items.next(p)) {
    for (bool last = false; !last; ++number) {
      const sm90::wide::Place place(number);
#pragma unroll 1
      for (int i = 0; i < sm90::kChunks; ++i) {
        const uint32_t slot = place.slot(static_cast<int>(sm90::wide::chunk_in_order(i)));
        ptx::mbarrier_wait(half + slot * 8, place.parity);
        if (i == 0) last = control.last[place.buffer];
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
          ptx::fence_async_proxy();
          const uint32_t bytes = ring + slot * sm90::kChunkBytes + rank * kHalfBytes;
          ptx::copy_to_remote(ptx::remote_address(bytes, rank ^ 1), bytes, kHalfBytes,
                              ptx::remote_address(full + slot * 8, rank ^ 1));
          ptx::mbarrier_arrive_expect(full + slot * 8, kHalfBytes);
        }
      }
    }
  }
}

}  // namespace mla::sparse_sm90
