// The loading warps: one finds the tiles and brings their queries, one brings keys and values.
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/prefill/sm90/format.cuh"
#include "kernels/prefill/sm90/schedule.cuh"

namespace mla::sm90_prefill {

// To all who read it. A tile that was not found tells them that there is none.
__device__ __forceinline__ void publish_tile(bool found, Control& control) {
  const Ring<kTiles> position{control.progress.tiles};
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    if (!found) control.tiles[position.slot()].rows = 0;
    for (int i = 0; i < kClearWarps; ++i) control.unusable[position.slot()][i] = kNever;
    ptx::mbarrier_arrive(barrier_at(ptx::shared_address(&control), offsetof(Control, tile_full), position.slot()));
  }
}

// Queries behind the tile's belong to others, or are zeros behind the last; what they give is never stored.
template <class Format>
__device__ __forceinline__ void copy_queries(const CUtensorMap* map, uint32_t queries, Control& control) {
  const uint32_t barriers = ptx::shared_address(&control);
  const Ring<kTiles> position{control.progress.tiles};
  const Tile& tile = control.tiles[position.slot()];
#pragma unroll 1
  for (int group = 0; group < kGroups; ++group) {
    ptx::mbarrier_wait(barrier_at(barriers, offsetof(Control, query_empty), group), position.count % 2 ^ 1);
    if (threadIdx.x % 32 == 0) {
      const uint32_t full = barrier_at(barriers, offsetof(Control, query_full), group);
      ptx::mbarrier_arrive_expect(full, Format::kQueryBytes);
      ptx::copy_box(queries + group * Format::kQueryBytes, map, full, ptx::evict_first_policy(), 0,
                    tile.first_query + group * kGroupQueries, 0, tile.head);
    }
    __syncwarp();
  }
  if (threadIdx.x % 32 == 0) control.progress.tiles = position.count + 1;
  __syncwarp();
}

template <class Format>
__device__ __forceinline__ void load_queries(const PrefillParams& p, const Schedule& schedule, const CUtensorMap* map,
                                             uint32_t queries, Control& control) {
  const uint32_t barriers = ptx::shared_address(&control);
  start_progress(p, schedule, control.progress);
  for (;;) {
    const Ring<kTiles> position{control.progress.tiles};
    ptx::mbarrier_wait(barrier_at(barriers, offsetof(Control, tile_empty), position.slot()), position.parity() ^ 1);
    const bool found = next_tile(p, schedule, control.progress, control.tiles[position.slot()]);
    publish_tile(found, control);
    if (!found) break;
    copy_queries<Format>(map, queries, control);
  }
}

// Bits first .. first + 127 of the key mask, by a whole warp: lane i has word i of four.
__device__ __forceinline__ uint32_t mask_word(const PrefillParams& p, int32_t first) {
  const int lane = threadIdx.x % 32;
  const int64_t index = first / 32 + lane, shift = first % 32;
  const uint32_t low = lane <= 4 && index * 32 < p.stored ? p.key_mask[index] : 0;
  const uint32_t high = __shfl_sync(0xFFFFFFFF, low, (lane + 1) % 32);
  return shift == 0 ? low : low >> shift | high << (32 - shift);
}

// The last block first, since that is where masks are. Keys behind the request's belong to others, or are zeros.
template <class Format, bool kKeyMask>
__device__ __forceinline__ void load_keys(const PrefillParams& p, const TensorMaps& maps, uint32_t memory,
                                          Control& control) {
  const int lane = threadIdx.x % 32;
  const uint32_t barriers = ptx::shared_address(&control);
  const uint64_t policy = ptx::evict_normal_policy();
  Ring<Format::kStages> position;
  for (Ring<kTiles> tile_position;; tile_position.advance()) {
    ptx::mbarrier_wait(barrier_at(barriers, offsetof(Control, tile_full), tile_position.slot()),
                       tile_position.parity());
    const Tile& tile = control.tiles[tile_position.slot()];
    if (tile.rows == 0) break;
#pragma unroll 1
    for (int32_t block = tile.blocks - 1; block >= 0; --block) {
      const int32_t first_key = tile.kv_begin + block * kBlockKeys;
      const uint32_t word = kKeyMask ? mask_word(p, first_key) : 0;
      const int slot = position.slot();
      ptx::mbarrier_wait(barrier_at(barriers, offsetof(Control, key_empty), slot), position.parity() ^ 1);
      if (kKeyMask && lane < 4) control.key_words[slot][lane] = word;
      __syncwarp();
      if (lane == 0) {
        const uint32_t full = barrier_at(barriers, offsetof(Control, key_full), slot);
        ptx::mbarrier_arrive_expect(full, Format::kKeyBytes);
        ptx::copy_box(memory + Format::kKeysAt + slot * Format::kKeyBytes, &maps.keys, full, policy, 0, first_key, 0,
                      tile.head);
      }
      ptx::mbarrier_wait(barrier_at(barriers, offsetof(Control, value_empty), slot), position.parity() ^ 1);
      if (kKeyMask && lane < 4) control.value_words[slot][lane] = word;
      __syncwarp();
      if (lane == 0) {
        const bool raw = kKeyMask || block >= tile.whole_blocks;
        const uint32_t full =
            barrier_at(barriers, raw ? offsetof(Control, value_raw) : offsetof(Control, value_full), slot);
        ptx::mbarrier_arrive_expect(full, Format::kValueBytes);
        ptx::copy_box(memory + Format::kValuesAt + slot * Format::kValueBytes, &maps.values, full, policy, 0, first_key,
                      0, tile.head);
        if (!raw) ptx::mbarrier_arrive(full);  // for the second clearing warp
      }
      position.advance();
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier_at(barriers, offsetof(Control, tile_empty), tile_position.slot()));
  }
}

}  // namespace mla::sm90_prefill
