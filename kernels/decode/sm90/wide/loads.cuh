// The warp that brings the keys of wide tiles.
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/decode/items.cuh"
#include "kernels/decode/sm90/wide/shape.h"

namespace mla::sm90::wide {

// A lane for each slice of a block. Tokens whose page is not in the cache lie outside the tensor map and arrive as
// zeros; so do those of pages behind the last key.
__device__ __forceinline__ void load_keys(const DecodeParams& p, const CUtensorMap* map, Items& items, int32_t layer,
                                          uint32_t blocks, Control& control) {
  const int lane = threadIdx.x % 32;
  const int64_t slice = lane % kBlockSlices * kSliceTokens;
  const uint32_t full = ptx::shared_address(control.full), empty = ptx::shared_address(control.empty);
  // Where a request has several tiles, others read the same keys.
  const uint64_t policy = p.plan.row_tiles == 1 ? ptx::evict_first_policy() : ptx::evict_normal_policy();
  uint32_t number = 0;

  while (items.next(p)) {
    Tile tile;
    if (!find_tile(p, items.item(), tile)) continue;
    int64_t token = tile.kv_begin + slice;
    SlotLookup next = look_up(p, tile, token);
    for (int32_t left = block_count(tile); left > 0; --left, ++number) {
      const SlotLookup lookup = next;
      token += kBlockTokens;
      next = look_up(p, tile, token);  // its latency is hidden behind this block's waits
      const bool valid = lookup.slot(p) >= 0;
      const uint32_t valid_slices = __ballot_sync(0xFFFFFFFF, valid) & kAllSlices;
      const Place place(number);
#pragma unroll
      for (int i = 0; i < kBlockSlots; ++i) {
        const uint32_t slot = place.slot(i), slot_full = full + slot * 8;
        ptx::mbarrier_wait(empty + slot * 8, place.parity ^ 1);
        if (lane == 0) {
          if (i == 0) control.valid_slices[place.buffer] = valid_slices;
          ptx::mbarrier_arrive_expect(slot_full, kSlotBytes);
        }
        __syncwarp();
        if (lane / kSlotSlices == i) {
          ptx::copy_box(blocks + slot * kSlotBytes + lane % kSlotSlices * kSliceBytes, map, slot_full, policy, 0,
                        lookup.offset, 0, valid ? lookup.page : -1, layer);
        }
      }
    }
  }
}

}  // namespace mla::sm90::wide
