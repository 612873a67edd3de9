// The two loading warps: one brings the keys, one says which items they belong to.
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/decode/items.cuh"
#include "kernels/decode/sm90/fp8/instructions.cuh"
#include "kernels/decode/sm90/fp8/shape.h"

namespace mla::sm90::fp8 {

// Fills the ring with the part's keys. Groups whose page is not in the cache lie outside the tensor maps and arrive as
// zeros; so do those of pages behind the last key. A lane for each copy, of as many groups as fit in both a page and a
// slot.
template <class Shape>
__device__ __forceinline__ void load_keys(const DecodeParams& p, const TensorMaps& maps, Items& items, int32_t layer,
                                          uint32_t ring, Control<Shape>& control) {
  const int lane = threadIdx.x % 32;
  const int32_t groups = copied_groups(p.page_size, Shape::kSlotGroups), copies = kTokenGroups / groups;
  const int32_t page_groups = p.page_size / kGroupTokens;
  const auto layer_group = static_cast<int32_t>(layer * p.pages * page_groups);
  const int first_group = lane % copies * groups;  // this lane's, in a block
  const uint32_t full = ptx::shared_address(control.full), empty = ptx::shared_address(control.empty);
  // Where a request has several tiles, others read the same keys.
  const uint64_t policy = p.plan.row_tiles == 1 ? ptx::evict_first_policy() : ptx::evict_normal_policy();
  Ring<Shape> position;

  while (items.next(p)) {
    // The page table's first entry is asked for together with the request's lengths, which say whether it is one.
    const int32_t request = items.item().request, page_size = p.page_size;
    const int64_t lane_token =
        int64_t{max_of(items.item().kv_begin, 0) / kBlockTokens} * kBlockTokens + first_group * kGroupTokens;
    const bool exists = request >= 0 && request < p.batch && lane_token < int64_t{p.max_pages} * page_size;
    const int32_t page = exists ? p.page_table[int64_t{request} * p.max_pages + lane_token / page_size] : -1;
    Tile tile;
    if (!find_tile(p, items.item(), tile)) continue;
    int64_t token = int64_t{tile.kv_begin} + first_group * kGroupTokens;
    SlotLookup next{token < tile.kv_end ? page : -1, static_cast<int32_t>(token % page_size)};
    const int32_t blocks = block_count(tile);
    const int32_t visible_to_all = visible_end(p, tile, 0);  // the first row belongs to the first query
    for (int32_t block = 0; block < blocks; ++block) {
      const SlotLookup lookup = next;
      token += kBlockTokens;
      next = look_up(p, tile, token);  // its latency is hidden behind this block's waits
      const bool valid = lookup.slot(p) >= 0;
      const uint32_t valid_copies = __ballot_sync(0xFFFFFFFF, valid);
      const uint32_t valid_groups = __ballot_sync(0xFFFFFFFF, lane < kTokenGroups && valid_copies >> lane / groups & 1);
#pragma unroll
      for (int part = 0; part < Shape::kBlockSlots; ++part, position.advance()) {
        const uint32_t slot_full = full + position.slot * 8;
        ptx::mbarrier_wait(empty + position.slot * 8, position.parity ^ 1);
        if (lane == 0) {
          const int32_t first_token = tile.kv_begin + block * kBlockTokens;
          control.blocks[position.slot] = {tile.kv_end - first_token, visible_to_all - first_token,
                                           valid_groups | (block + 1 == blocks ? kLast : 0)};
          ptx::mbarrier_arrive_expect(slot_full, Shape::kSlotBytes);
        }
        __syncwarp();
        if (lane < copies && (Shape::kBlockSlots == 1 || first_group / Shape::kSlotGroups == part)) {
          const int slot_group = first_group - part * Shape::kSlotGroups;
          const uint32_t slot = ring + position.slot * Shape::kSlotBytes;
          const int32_t group =
              valid ? layer_group + lookup.page * page_groups + lookup.offset / kGroupTokens : -kTokenGroups;
          ptx::copy_box(slot + slot_group * kLatentGroupBytes, &maps.latent, slot_full, policy, 0, 0, 0, group);
          ptx::copy_box(slot + Shape::kRopeOffset + slot_group * kRopeGroupBytes, &maps.rope, slot_full, policy, 0, 0,
                        group);
        }
      }
    }
  }
  ptx::mbarrier_wait(empty + position.slot * 8, position.parity ^ 1);
  if (lane == 0) {
    control.blocks[position.slot] = {0, 0, kStop};
    ptx::mbarrier_arrive(full + position.slot * 8);
  }
}

// Tells the score warps of each item as soon as they have taken in the one before. One thread.
template <class Shape>
__device__ __forceinline__ void announce_items(const DecodeParams& p, Control<Shape>& control) {
  const uint32_t full = ptx::shared_address(&control.tile_full), empty = ptx::shared_address(&control.tile_empty);
  uint32_t parity = 0;
  Items items(p);
  while (items.next(p)) {
    Tile tile;
    if (!find_tile(p, items.item(), tile)) continue;
    ptx::mbarrier_wait(empty, parity ^ 1);
    control.tile = tile;
    ptx::mbarrier_arrive(full);
    parity ^= 1;
  }
  ptx::mbarrier_wait(empty, parity ^ 1);
  control.tile.rows = 0;
  ptx::mbarrier_arrive(full);
}

}  // namespace mla::sm90::fp8
