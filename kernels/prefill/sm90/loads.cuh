// The loading warps: one finds the tiles and brings their queries, one brings keys and values.
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/prefill/sm90/format.cuh"
#include "kernels/prefill/sm90/retry.cuh"
#include "kernels/prefill/sm90/schedule.cuh"

namespace mla::sm90_prefill {

// To all who read it.
__device__ __forceinline__ void publish_tile(Control& control) {
  const Ring<kTiles> position{control.progress.tiles};
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < kClearWarps; ++i) control.unusable[position.slot()][i] = kNever;
  }
  ptx::mbarrier_arrive_in_step(
      barrier_at(ptx::shared_address(&control), offsetof(Control, tile_full), position.slot()));
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
    // A lane that looks late, when the copy is there and used already, would wait for the phase after that.
    __syncwarp();
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

// Waits until the tile `ahead` of the one that is published next has a slot.
__device__ __forceinline__ void await_slot(uint32_t ahead, Control& control) {
  const Ring<kTiles> position{control.progress.tiles + ahead};
  ptx::mbarrier_wait(barrier_at(ptx::shared_address(&control), offsetof(Control, tile_empty), position.slot()),
                     position.parity() ^ 1);
}

// When all tiles have come: back to the first round, once it is known which have to come again. That is after a tile
// without keys that nobody writes, since who attends waits for the next tile before the end of one with keys.
template <class Format>
__device__ __forceinline__ void start_retries(const Schedule& schedule, const CUtensorMap* map, uint32_t queries,
                                              Control& control) {
  constexpr uint32_t kNobody = kAllWarps + 1;
  if (threadIdx.x % 32 == 0) {
    Tile& tile = control.tiles[control.progress.tiles % kTiles];
    tile = {};
    tile.rows = 1;
    tile.careful = kNobody;
  }
  publish_tile(control);
  copy_queries<Format>(map, queries, control);
#pragma unroll 1
  for (uint32_t ahead = 0; ahead < kTiles; ++ahead) await_slot(ahead, control);
  const uint32_t ended = control.progress.round, fast = schedule.fast_rounds;
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    control.progress.retrying = true;
    control.progress.retry_end = ended < fast ? ended : fast;
    control.progress.round = 0;
  }
  __syncwarp();
}

// All tiles, then once more those that some warp did not write.
template <class Format>
__device__ __forceinline__ void load_queries(const PrefillParams& p, const Schedule& schedule, const CUtensorMap* map,
                                             uint32_t queries, Control& control) {
  start_progress<Format>(p, schedule, control.progress);
#pragma unroll 1
  while (!control.progress.retrying || next_retry(control)) {
    await_slot(0, control);
    Tile& tile = control.tiles[control.progress.tiles % kTiles];
    if (!next_tile<Format>(p, schedule, control.progress, tile)) {
      start_retries<Format>(schedule, map, queries, control);
      continue;
    }
    publish_tile(control);
    copy_queries<Format>(map, queries, control);
  }
  await_slot(0, control);
  if (threadIdx.x % 32 == 0) control.tiles[control.progress.tiles % kTiles].rows = 0;
  publish_tile(control);
}

// Bits first .. first + 127 of the key mask, by a whole warp: lane i has word i of four.
__device__ __forceinline__ uint32_t mask_word(const PrefillParams& p, int32_t first) {
  const int lane = threadIdx.x % 32;
  const int64_t index = first / 32 + lane, shift = first % 32;
  const uint32_t low = lane <= 4 && index * 32 < p.stored ? p.key_mask[index] : 0;
  const uint32_t high = __shfl_sync(0xFFFFFFFF, low, (lane + 1) % 32);
  return shift == 0 ? low : low >> shift | high << (32 - shift);
}

// Word `index` of four, with the bits from `begin` on and before `end` set.
__device__ __forceinline__ uint32_t range_word(int32_t begin, int32_t end, int index) {
  const int32_t low = clamp(begin - 32 * index, 0, 32), high = clamp(end - 32 * index, 0, 32);
  return low < high ? 0xFFFFFFFF << low & 0xFFFFFFFF >> (32 - high) : 0;
}

// A block of keys, by one thread: an arrival at `full`, and all its bytes. Their parts land as chunks side by side.
template <class Format>
__device__ __forceinline__ void copy_keys(const PrefillParams& p, const TensorMaps& maps, uint32_t shared,
                                          int32_t first_key, int32_t head, uint32_t full, uint64_t policy) {
  ptx::mbarrier_arrive_expect(full, Format::kKeyBytes);
  ptx::copy_box(shared, &maps.nope, full, policy, 0, first_key, 0, head);
  ptx::copy_box(shared + kNopeChunks * Format::kKeyChunkBytes, &maps.rope, full, policy, 0, first_key, 0,
                p.k_pe == nullptr ? head : 0);
}

// A block of values, by one thread: an arrival at `full`, and all its bytes. What lies behind the array is zeros, or in
// tiles stays as it was.
template <class Format>
__device__ __forceinline__ void copy_values(const PrefillParams& p, const CUtensorMap* map, uint32_t shared,
                                            int32_t first_key, int32_t head, uint32_t full, uint64_t policy) {
  if constexpr (Format::kFp8Values) {
    constexpr int kTileBytes = Format::kValueTileBytes;
    const int32_t first = first_key / kValueTile, left = (static_cast<int32_t>(p.stored) - 1) / kValueTile + 1 - first;
    const int32_t tiles = clamp(left, 0, kBlockKeys / kValueTile);
    const char* values = static_cast<const char*>(p.v) + (int64_t{first} * p.heads + head) * kTileBytes;
    ptx::mbarrier_arrive_expect(full, tiles * kTileBytes);
#pragma unroll 1
    for (int32_t tile = 0; tile < tiles; ++tile, values += int64_t{p.heads} * kTileBytes) {
      ptx::copy_bytes(shared + tile * kTileBytes, values, kTileBytes, full, policy);
    }
  } else {
    ptx::mbarrier_arrive_expect(full, Format::kValueBytes);
    ptx::copy_box(shared, map, full, policy, 0, first_key, 0, head);
  }
}

// The last block first, since that is where masks are. Keys behind the request's belong to others, or are zeros. By a
// whole warp where there is a key mask, else by its lane 0.
template <class Format, bool kKeyMask>
__device__ __forceinline__ void load_keys(const PrefillParams& p, const TensorMaps& maps, uint32_t memory,
                                          Control& control) {
  const int lane = threadIdx.x % 32;
  // By lane 0, whose arrival they are read behind.
  const auto store_words = [lane](uint32_t word, uint32_t (&words)[4]) {
    if constexpr (kKeyMask) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t own = __shfl_sync(0xFFFFFFFF, word, i);
        if (lane == 0) words[i] = own;
      }
    }
  };
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
      const int32_t first_key = Format::origin(tile.kv_begin) + block * kBlockKeys;
      uint32_t word = kKeyMask ? mask_word(p, first_key) : 0;
      if (kKeyMask && Format::kFp8Values) word &= range_word(tile.kv_begin - first_key, tile.kv_end - first_key, lane);
      const int slot = position.slot();
      ptx::mbarrier_wait(barrier_at(barriers, offsetof(Control, key_empty), slot), position.parity() ^ 1);
      store_words(word, control.key_words[slot]);
      if (lane == 0) {
        const uint32_t full = barrier_at(barriers, offsetof(Control, key_full), slot);
        copy_keys<Format>(p, maps, memory + Format::kKeysAt + slot * Format::kKeyBytes, first_key, tile.head, full,
                          policy);
      }
      ptx::mbarrier_wait(barrier_at(barriers, offsetof(Control, value_empty), slot), position.parity() ^ 1);
      store_words(word, control.value_words[slot]);
      if (lane == 0) {
        const bool raw = is_cleared<Format, kKeyMask>(tile, block);
        const uint32_t full =
            barrier_at(barriers, raw ? offsetof(Control, value_raw) : offsetof(Control, value_full), slot);
        copy_values<Format>(p, &maps.values, memory + Format::kValuesAt + slot * Format::kValueBytes, first_key,
                            tile.head, full, policy);
        // For the clearing warps; the copy has arrived once.
        for (uint32_t i = 1; !raw && i < kClearWarps * ptx::kWarpArrivals; ++i) ptx::mbarrier_arrive(full);
      }
      position.advance();
    }
    const uint32_t tile_empty = barrier_at(barriers, offsetof(Control, tile_empty), tile_position.slot());
    if constexpr (kKeyMask) {
      ptx::mbarrier_arrive_warp(tile_empty);
    } else {
      ptx::mbarrier_arrive(tile_empty);
    }
  }
}

}  // namespace mla::sm90_prefill
