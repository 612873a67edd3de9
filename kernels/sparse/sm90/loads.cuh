// The warps that bring chosen tokens of 16-bit caches. Tokens lie wherever their slots say, so the copy engine, which
// swizzles whole boxes alone, would take a copy for every token and chunk; cp.async puts any 16 bytes in their place.
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/sparse/sm90/shape.h"

namespace mla {

// As for DecodeParams in kernels/decode/work.cuh: cp.async writes as ordinary stores do, and the tensor cores read by
// another proxy.
__device__ __forceinline__ void order_arrived_keys(const SparseDecodeParams&) { ptx::fence_async_proxy(); }

}  // namespace mla

namespace mla::sparse_sm90 {

// By the key warps; the first of them reads the indices for all. A slot is full, or this CTA's half of it, when the
// last thread's copies have written; readers order what they then see before their products (`order_arrived_keys`),
// since cp.async writes by another proxy.
template <class Layout>
__device__ __forceinline__ void load_tokens(const SparseDecodeParams& p, int warp, uint32_t ring,
                                            typename Layout::Control& control, ChosenRing& chosen) {
  const unsigned char* const layer = layer_of(p, kTokenBytes);
  constexpr int kTokens = kBlockTokens / Layout::kCtas;  // of a block, that this CTA brings
  const uint32_t arrivals = Layout::arrivals(control), empty = ptx::shared_address(control.empty);
  ChosenPlace place;
  typename Layout::Position position;
  TokenRows<Layout::kKeyWarps, kTokens> rows(warp, blockIdx.x % Layout::kCtas * kTokens);

  SparseItems items(p);
  while (items.next(p)) {
    ChosenSlots indices(p, warp == 0 ? tile_of(p, SparseWork(p, items.item())) : Tile{});
    for (bool last = false; !last; place.advance()) {
      if (warp == 0) indices.next_block(p, place, chosen);
      ptx::barrier_sync(kListBarrier, 32 * Layout::kKeyWarps);
      last = chosen.last[place.block];
      rows.find(chosen.slots + place.block * kBlockTokens);
#pragma unroll 1
      for (int turn = 0; turn < sm90::kChunks / Layout::kSlotChunks; ++turn) {
        const int chunk = Layout::first_chunk(turn);
        const uint32_t slot = position.slot(chunk);
        ptx::mbarrier_wait(empty + slot * 8, position.parity() ^ 1);
        if constexpr (Layout::kCtas > 1) {
          if (turn == 0 && warp == 0 && threadIdx.x % 32 == 0) {
            control.last[position.block % sm90::wide::kBlocks] = last;
            ptx::mbarrier_arrive(arrivals + slot * 8);
          }
        }
#pragma unroll
        for (int i = 0; i < Layout::kSlotChunks; ++i) {
          rows.copy(layer, chunk + i, ring + (slot * Layout::kSlotChunks + i) * sm90::kChunkBytes);
        }
        ptx::cp_async_arrive(arrivals + slot * 8);
        position.end_slot();
      }
      position.end_block();
    }
  }
}

}  // namespace mla::sparse_sm90
