// The loading warps: three bring the chosen tokens, a copy each, one says which items they belong to.
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/sparse/sm90/fp8/shape.h"

namespace mla::sparse_sm90::fp8 {

// Lanes of the first warp that write zeros behind the last token: all, but for racecheck the one that arrives.
constexpr int kClearLanes = ptx::kWarpArrivals > 1 ? 1 : 32;

// Fills the ring, by the token warps; the first of them reads the indices for all. A copy takes its operands from
// uniform registers, so a warp asks for its lanes' copies one after the other, about 70 cycles each: one warp alone
// would need twice the time that memory does. Behind an item's last token are zeros, which weigh nothing and have
// scales of 0.
template <class Shape>
__device__ __forceinline__ void load_tokens(const SparseDecodeParams& p, int warp, uint32_t ring,
                                            dense::Control<Shape>& control, ChosenRing& chosen) {
  using Layout = typename Shape::Layout;
  constexpr int kSlotTokens = kBlockTokens / Shape::kBlockSlots;
  const int lane = threadIdx.x % 32, token = lane * kTokenWarps + warp;  // a lane has at most one of a block
  const unsigned char* const layer = layer_of(p, Layout::kTokenBytes);
  const uint32_t full = ptx::shared_address(control.full), empty = ptx::shared_address(control.empty);
  // Other tiles of the query token, and other query tokens, read the same.
  const uint64_t policy = ptx::evict_normal_policy();
  dense::Ring<Shape> position;

  // Tiles of 64 rows wait for a free slot, and what counts there is how soon it is full again.
  constexpr bool kAhead = Shape::kRows < 64;
  ChosenBlocks<kListBarrier, kTokenWarps, kAhead> blocks(/*writer=*/warp == 0, chosen);
  SparseItems items(p);
  while (items.next(p)) {
    blocks.begin_item(p, items.item());
    bool last = false;
    do {
      blocks.next(p);
      last = blocks.last();
      const int32_t slot = token < kBlockTokens ? blocks.slots()[token] : -1;
#pragma unroll 1
      for (int first = 0; first < kBlockTokens; first += kSlotTokens, position.advance()) {
        const uint32_t slot_full = full + position.slot * 8, target = ring + position.slot * Shape::kSlotBytes;
        ptx::mbarrier_wait(empty + position.slot * 8, position.parity ^ 1);
        if (warp == 0) {
          const int32_t left = blocks.count() - first;
          const int32_t count = Shape::kBlockSlots == 1 ? left : min_of(max_of(left, 0), kSlotTokens);
          if (lane < kClearLanes) {
            for (int i = count * Layout::kStride / 16 + lane; i < Shape::kSlotBytes / 16; i += kClearLanes) {
              ptx::store_shared_16(target + i * 16, {});
            }
          }
          if (count < kSlotTokens) ptx::fence_async_proxy();  // before the copy engine writes there again
          if (lane == 0) {
            control.blocks[position.slot] = {kBlockTokens, kBlockTokens, dense::kAllGroups | (last ? dense::kLast : 0)};
          }
          __syncwarp();
          // The other warps' bytes may have arrived by now: the phase ends with this arrival and the last of them.
          if (lane == 0) ptx::mbarrier_arrive_expect(slot_full, static_cast<uint32_t>(count) * Layout::kTokenBytes);
        }
        __syncwarp();
        if (slot >= 0 && (Shape::kBlockSlots == 1 || token / kSlotTokens * kSlotTokens == first)) {
          ptx::copy_bytes(target + (token - first) * Layout::kStride, layer + int64_t{slot} * Layout::kTokenBytes,
                          Layout::kTokenBytes, slot_full, policy);
        }
      }
    } while (!last);
  }
  if (warp != 0) return;
  ptx::mbarrier_wait(empty + position.slot * 8, position.parity ^ 1);
  if (lane == 0) control.blocks[position.slot] = {0, 0, dense::kStop};
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(full + position.slot * 8);
}

// What the warps that attend need of an item's scales, a slot after the other as they arrive; where tokens have some.
template <class Shape>
__device__ __forceinline__ void prepare_item(const Tile& tile, uint32_t base, dense::Ring<Shape>& position,
                                             dense::Control<Shape>& control) {
  for (int32_t left = dense::block_count(tile) * Shape::kBlockSlots; left > 0; --left, position.advance()) {
    ptx::mbarrier_wait(ptx::shared_address(&control.full[position.slot]), position.parity);
    prepare_scales(base + position.slot * Shape::kSlotBytes);
    ptx::fence_async_proxy();  // before the copy engine writes there again
    ptx::mbarrier_arrive_warp(base + Shape::kScaledOffset + position.slot * 8);
  }
}

// Tells the score warps of each item as soon as they have taken in the one before. A whole warp, which counts.
template <class Shape>
__device__ __forceinline__ void announce_items(const SparseDecodeParams& p, uint32_t base,
                                               dense::Control<Shape>& control) {
  [[maybe_unused]] dense::Ring<Shape> position;
  const uint32_t full = ptx::shared_address(&control.tile_full), empty = ptx::shared_address(&control.tile_empty);
  const bool speaks = threadIdx.x % 32 == 0;
  uint32_t parity = 0;
  SparseItems items(p);
  bool more = true;
  while (more) {
    more = items.next(p);
    Tile tile{};  // of no rows: there is none, and none will come
    if (more) find_tile(p, items.item(), tile);
    ptx::mbarrier_wait(empty, parity ^ 1);
    if (speaks) {
      control.tile = tile;
      ptx::mbarrier_arrive(full);
    }
    parity ^= 1;
    if constexpr (Shape::kPreparesScales) {
      if (more) prepare_item<Shape>(tile, base, position, control);
    }
  }
}

}  // namespace mla::sparse_sm90::fp8
