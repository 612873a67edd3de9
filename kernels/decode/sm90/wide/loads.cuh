// The warps that bring the keys of wide tiles.
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/decode/items.cuh"
#include "kernels/decode/sm90/wide/shape.h"

namespace mla::sm90::wide {

// Every third chunk by each of the key warps; a lane for each slice of a block, of which those where a page begins copy
// the page's part of the block. Tokens whose page is not in the cache lie outside the tensor map and arrive as zeros;
// so do those of pages behind the last key.
__device__ __forceinline__ void load_keys(const DecodeParams& p, const CUtensorMap* map, Items& items, int32_t layer,
                                          int warp, uint32_t blocks, Control& control) {
  const int lane = threadIdx.x % 32;
  const int slice = lane % kBlockSlices;
  const bool copies = lane < kBlockSlices && slice % (min_of(p.page_size, kBlockTokens) / kSliceTokens) == 0;
  const uint32_t full = ptx::shared_address(control.full), empty = ptx::shared_address(control.empty);
  // Where a request has several tiles, others read the same keys.
  const uint64_t policy = p.plan.row_tiles == 1 ? ptx::evict_first_policy() : ptx::evict_normal_policy();
  uint32_t number = 0;

  while (items.next(p)) {
    Tile tile;
    if (!find_tile(p, items.item(), tile)) continue;
    int64_t token = int64_t{tile.kv_begin} + slice * kSliceTokens;
    SlotLookup next = look_up(p, tile, token);
    for (int32_t left = block_count(tile); left > 0; --left, ++number) {
      const SlotLookup lookup = next;
      token += kBlockTokens;
      next = look_up(p, tile, token);  // its latency is hidden behind this block's waits
      const bool valid = lookup.slot(p) >= 0;
      const uint32_t valid_slices = __ballot_sync(0xFFFFFFFF, valid) & kAllSlices;
      const Place place(number);
#pragma unroll
      for (int i = 0; i < kChunks / kKeyWarps; ++i) {
        const int chunk = chunk_in_order(i * kKeyWarps + warp);
        const uint32_t slot = place.slot(chunk), slot_full = full + slot * 8;
        ptx::mbarrier_wait(empty + slot * 8, place.parity ^ 1);
        if (lane == 0) {
          if (chunk == kRopeChunk) control.valid_slices[place.buffer] = valid_slices;
          ptx::mbarrier_arrive_expect(slot_full, kChunkBytes);
        }
        __syncwarp();
        if (copies) {
          ptx::copy_box(blocks + slot * kChunkBytes + slice * kSliceTokens * kLineBytes, map, slot_full, policy, 0,
                        lookup.offset, chunk, valid ? lookup.page : -1, layer);
        }
      }
    }
  }
}

}  // namespace mla::sm90::wide
