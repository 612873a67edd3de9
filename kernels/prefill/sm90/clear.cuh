// Values of keys that some query must not see: what a weight of 0 does not silence is overwritten in shared memory, by
// two warps that have nothing else to do, while the scores of the block are computed.
#pragma once

#include <type_traits>

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/prefill/sm90/format.cuh"

namespace mla::sm90_prefill {

constexpr int kClearThreads = 32 * kClearWarps;

template <class Element>
__device__ __forceinline__ bool has_nonfinite(uint32_t pair) {
  constexpr uint32_t kExponent = std::is_same_v<Element, __half> ? 0x7C00 : 0x7F80;
  return (pair & kExponent) == kExponent || (pair & kExponent << 16) == kExponent << 16;
}

// Keys of a block: from `hidden` on some query does not see them, from `unused` on nobody does, nor those whose bit in
// `words` (null: all set) is clear. The latter become zeros; of the others what is not finite. Returns the first key of
// which a value was not finite, or kNever: who sees that one is NaN.
template <class Format>
__device__ __forceinline__ int32_t clear_block(uint32_t values, int thread, int32_t hidden, int32_t unused,
                                               const uint32_t* words) {
  using Element = typename Format::Value;
  constexpr int kVectors = kChunkColumns * sizeof(Element) / 16;
  int32_t first = kNever;
#pragma unroll 1
  for (int i = hidden * kVectors + thread; i < kBlockKeys * kVectors; i += kClearThreads) {
    const int key = i / kVectors;
    const bool used = key < unused && (words == nullptr || words[key / 32] >> key % 32 & 1);
#pragma unroll 1
    for (int chunk = 0; chunk < kValueChunks; ++chunk) {
      const uint32_t address = values + chunk * Format::kValueChunkBytes + i * 16;
      if (!used) {
        ptx::store_shared_16(address, uint4{});
        continue;
      }
      const uint4 value = ptx::load_shared_16(address);
      if (!has_nonfinite<Element>(value.x) && !has_nonfinite<Element>(value.y) && !has_nonfinite<Element>(value.z) &&
          !has_nonfinite<Element>(value.w)) {
        continue;
      }
      ptx::store_shared_16(address, {finite<Element>(value.x), finite<Element>(value.y), finite<Element>(value.z),
                                     finite<Element>(value.w)});
      first = key < first ? key : first;
    }
  }
  return first;
}

// The same of values in tiles. Nobody sees the keys before `used` either; `words`, where there are any, know of those.
template <bool kKeyMask>
__device__ __forceinline__ int32_t clear_tiles(uint32_t values, int thread, int32_t used, int32_t hidden,
                                               int32_t unused, const uint32_t* words) {
  int32_t first = kNever;
#pragma unroll 1
  for (int32_t key = 0; key < kBlockKeys; key += kValueTile) {
    if (!kKeyMask && key >= used && key + kValueTile <= hidden) continue;
    uint32_t bits = 0xFFFF;
    if constexpr (kKeyMask) {
      bits = words[key / 32] >> key % 32;
    } else {
      bits <<= clamp(used - key, 0, kValueTile);
      bits &= (1 << clamp(unused - key, 0, kValueTile)) - 1;
    }
#pragma unroll 1
    for (int row = thread; row < kNope; row += kClearThreads) {
      const uint32_t address = values + (key * kNope + row * kValueTile);
      uint4 value = ptx::load_shared_16(address);
      uint32_t (&fours)[4] = reinterpret_cast<uint32_t (&)[4]>(value);
      // Of the keys 2q, 2q + 1, 2q + 8 and 2q + 9.
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const uint32_t four = bits >> (2 * q);
        fours[q] &=
            (four & 1) * 0xFF | (four >> 1 & 1) * 0xFF00 | (four >> 8 & 1) * 0xFF0000 | (four >> 9 & 1) * 0xFF000000;
        const uint32_t nan = ((fours[q] & 0x7F7F7F7F) + 0x01010101) & 0x80808080;
        if (nan == 0) continue;
        fours[q] &= ~((nan >> 7) * 0xFF);
        const int32_t own = key + 2 * q + (nan & 0x80 ? 0 : nan & 0x8000 ? 1 : nan & 0x800000 ? 8 : 9);
        first = own < first ? own : first;
      }
      ptx::store_shared_16(address, value);
    }
  }
  return first;
}

template <class Format, bool kKeyMask>
__device__ __forceinline__ void clear_values(const PrefillParams& p, uint32_t memory, Control& control) {
  const int lane = threadIdx.x % 32;
  const int thread = static_cast<int>(threadIdx.x) - 32 * kClearWarp, warp = thread / 32;
  const uint32_t barriers = ptx::shared_address(&control);
  Ring<Format::kStages> position;
  uint32_t raw_parities = 0;  // a bit for each slot: value_raw has a phase where there is something to clear, else none
  for (Ring<kTiles> tile_position;; tile_position.advance()) {
    ptx::mbarrier_wait(barrier_at(barriers, offsetof(Control, tile_full), tile_position.slot()),
                       tile_position.parity());
    const Tile& tile = control.tiles[tile_position.slot()];
    if (tile.rows == 0) break;
    int32_t block = tile.blocks - 1;
    if (!kKeyMask && tile.careful == 0) {
      position.advance(tile.blocks);
      block = -1;
    }
#pragma unroll 1
    for (; block >= 0; --block, position.advance()) {
      if (!is_cleared<Format, kKeyMask>(tile, block)) continue;
      const int slot = position.slot();
      ptx::mbarrier_wait(barrier_at(barriers, offsetof(Control, value_raw), slot), raw_parities >> slot & 1);
      raw_parities ^= 1u << slot;
      const int32_t first_key = Format::origin(tile.kv_begin) + block * kBlockKeys;
      const uint32_t* words = kKeyMask ? control.value_words[slot] : nullptr;
      const bool masked = kKeyMask && (words[0] & words[1] & words[2] & words[3]) != 0xFFFFFFFF;
      const int32_t hidden =
          masked ? 0 : clamp(visible_end(tile, p.causal, tile.first_query) - first_key, 0, kBlockKeys);
      const uint32_t values = memory + Format::kValuesAt + slot * Format::kValueBytes;
      const int32_t unused = clamp(tile.kv_end - first_key, 0, kBlockKeys);
      int32_t first;
      if constexpr (Format::kFp8Values) {
        first = clear_tiles<kKeyMask>(values, thread, tile.kv_begin - first_key, hidden, unused, words);
      } else {
        first = clear_block<Format>(values, thread, hidden, unused, words);
      }
      first = __reduce_min_sync(0xFFFFFFFF, first);
      if (first != kNever && lane == 0) {  // blocks come from the last to the first
        control.unusable[tile_position.slot()][warp] = first_key + first;
      }
      ptx::fence_async_proxy();
      ptx::mbarrier_arrive_warp(barrier_at(barriers, offsetof(Control, value_full), slot));
    }
    ptx::mbarrier_arrive_warp(barrier_at(barriers, offsetof(Control, tile_empty), tile_position.slot()));
  }
}

}  // namespace mla::sm90_prefill
