// The two loading warps: one brings the keys, one the queries and the items that they belong to.
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/decode/items.cuh"
#include "kernels/decode/sm90/shape.h"

namespace mla::sm90 {

// How a slot is filled. Pages of 64 tokens or more: by one box. Smaller ones: a lane for each page of
// the block and each chunk, since the tokens of a page do not lie beside those of the next.
struct SlotBoxes {
  int pages;  // that share a block
  int boxes;  // of a slot
  int page;   // this lane's box
  int chunk;
  uint32_t offset;  // of it in the slot

  __device__ __forceinline__ SlotBoxes(int32_t page_size, int lane) {
    pages = page_size < kBlockTokens ? kBlockTokens / page_size : 1;
    boxes = pages == 1 ? 1 : pages * kSlotChunks;
    page = lane % pages;
    chunk = pages == 1 ? 0 : lane / pages;
    offset = chunk * kChunkBytes + (pages == 1 ? 0 : page * page_size * kLineBytes);
  }
};

// Fills the ring with the part's keys. Tokens whose page is not in the cache lie outside the tensor map and arrive as
// zeros; so do those of pages behind the last key.
template <class Shape>
__device__ __forceinline__ void load_keys(const DecodeParams& p, const CUtensorMap* map, Items& items, int32_t layer,
                                          uint32_t ring, Control<Shape>& control) {
  const int lane = threadIdx.x % 32;
  const SlotBoxes boxes(p.page_size, lane);
  const uint32_t full = ptx::shared_address(control.full), empty = ptx::shared_address(control.empty);
  // Where a request has several tiles, others read the same keys.
  const uint64_t policy = p.plan.row_tiles == 1 ? ptx::evict_first_policy() : ptx::evict_normal_policy();
  Ring<Shape> position;

  while (items.next(p)) {
    // The page table's first entry is asked for together with the request's lengths, which say whether it is one.
    const int32_t request = items.item().request, page_tokens = p.page_size;
    const int32_t first_page =
        max_of(items.item().kv_begin, 0) / kBlockTokens * kBlockTokens / page_tokens + boxes.page;
    const bool exists = request >= 0 && request < p.batch && first_page < p.max_pages;
    const int32_t page = exists ? p.page_table[int64_t{request} * p.max_pages + first_page] : -1;
    Tile tile;
    if (!find_tile(p, items.item(), tile)) continue;
    int64_t token = int64_t{tile.kv_begin} + boxes.page * page_tokens;  // the first of this lane's page
    SlotLookup next{token < tile.kv_end ? page : -1, tile.kv_begin % page_tokens};
    const int32_t blocks = block_count(tile);
    for (int32_t block = 0; block < blocks; ++block) {
      const SlotLookup lookup = next;
      token += kBlockTokens;
      next = look_up(p, tile, token);  // its latency is hidden behind this block's waits
      const bool valid = lookup.slot(p) >= 0;
      const uint32_t valid_pages = __ballot_sync(0xFFFFFFFF, valid);
#pragma unroll
      for (int i = 0; i < kBlockSlots; ++i) {
        const uint32_t slot_full = full + position.slot * 8;
        ptx::mbarrier_wait(empty + position.slot * 8, position.parity ^ 1);
        if (lane == 0) {
          if (i == 0) control.valid_pages[position.slot] = valid_pages;
          ptx::mbarrier_arrive_expect(slot_full, kSlotBytes);
        }
        __syncwarp();
        if (lane < boxes.boxes) {
          ptx::copy_box(ring + position.slot * kSlotBytes + boxes.offset, map, slot_full, policy, 0, lookup.offset,
                        i * kSlotChunks + boxes.chunk, valid ? lookup.page : -1, layer);
        }
        position.advance();
      }
    }
  }
}

// Brings each item's queries as soon as the scores of the one before are done with theirs, and what the score warps
// have to know of the item. Rows behind the tile's are queries of others, or zeros behind the last; what they give is
// never stored.
template <class Shape, class Items, class Params, class Maps, class Control>
__device__ __forceinline__ void load_queries(const Params& p, const Maps& maps, uint32_t queries, Control& control) {
  const int lane = threadIdx.x % 32;
  const uint32_t full = ptx::shared_address(&control.query_full), empty = ptx::shared_address(&control.query_empty);
  const uint64_t policy = ptx::evict_normal_policy();
  uint32_t parity = 0;
  if (lane == 0) {
    ptx::prefetch_tensor_map(&maps.q_latent);
    ptx::prefetch_tensor_map(&maps.q_rope);
  }

  Items items(p);
  while (items.next(p)) {
    Tile tile;
    if (!find_tile(p, items.item(), tile)) continue;
    // Two items in turn: when this wait is over, the score warps have done with the item before the last.
    ptx::mbarrier_wait(empty, parity ^ 1);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect(full, Shape::kQueryBytes);
      const auto row = static_cast<int32_t>(tile.first_row);
      ptx::copy_box(queries, &maps.q_latent, full, policy, 0, row, 0);
      ptx::copy_box(queries + kLatentChunks * Shape::kQueryChunkBytes, &maps.q_rope, full, policy, 0, row, 0);
    }
    // Where the item's partial will be written: the page's translation takes a microsecond, which hides here.
    if (tile.partial >= 0 && lane < 2) {
      ptx::prefetch_line(p.partial_out +
                         (partial_row(p, tile.partial, tile.first_row, Shape::kRows) + lane * (Shape::kRows - 1)) *
                             kLatent);
    }
    Queries<Shape>& target = control.queries[parity];
    for (int row = lane; row < Shape::kRows; row += 32) target.visible_end[row] = visible_end(p, tile, row);
    if (lane == 0) target.tile = tile;
    ptx::mbarrier_arrive_warp(full);
    parity ^= 1;
  }
  ptx::mbarrier_wait(empty, parity ^ 1);
  if (lane == 0) {
    control.queries[parity].tile.rows = 0;
    ptx::mbarrier_arrive(full);
  }
  ptx::mbarrier_arrive_warp(full);
}

}  // namespace mla::sm90
