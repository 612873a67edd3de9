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

// Of a block: neighbouring chunks, when their places are free. A slot is full when the last thread's copies have
// written; readers order what they then see before their products (`order_arrived_keys`), since cp.async writes by
// another proxy.
template <class Layout, int kCopied>
__device__ __forceinline__ void bring_chunks(const unsigned char* layer, int chunk, const TokenRows& rows,
                                             uint32_t ring, typename Layout::Control& control,
                                             const typename Layout::Position& position) {
  constexpr int kSlots = kCopied / Layout::kSlotChunks;
  const uint32_t full = ptx::shared_address(control.full), empty = ptx::shared_address(control.empty);
  const uint32_t slot = position.slot(chunk);
#pragma unroll
  for (int i = 0; i < kSlots; ++i) ptx::mbarrier_wait(empty + (slot + i) * 8, position.parity() ^ 1);
  rows.copy<kCopied>(layer, chunk, ring + slot * Layout::kSlotChunks * sm90::kChunkBytes);
#pragma unroll
  for (int i = 0; i < kSlots; ++i) ptx::cp_async_arrive(full + (slot + i) * 8);
}

// By the key warps; the first of them reads the indices for all.
template <class Layout>
__device__ __forceinline__ void load_tokens(const SparseDecodeParams& p, int warp, uint32_t ring,
                                            typename Layout::Control& control, ChosenRing& chosen) {
  const unsigned char* const layer = layer_of(p, kTokenBytes);
  typename Layout::Position position;
  TokenRows rows(warp);
  ChosenBlocks<kListBarrier, kKeyWarps, /*kAhead=*/true> blocks(/*writer=*/warp == 0, chosen);
  SparseItems items(p);
  while (items.next(p)) {
    blocks.begin_item(p, items.item());
    do {
      blocks.next(p);
      rows.find(blocks.slots());
      Layout::for_steps([&](auto chunks, int first) {
        bring_chunks<Layout, decltype(chunks)::value>(layer, first, rows, ring, control, position);
        position.end_step();
      });
      position.end_block();
    } while (!blocks.last());
  }
}

}  // namespace mla::sparse_sm90
