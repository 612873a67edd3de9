// gfx942: memory to registers, and from there to LDS, values transposed on the way.
//
// Values lie in lines of a column each, keys in the order in which products want them: chunk 2 * s + half has keys
// 16 * s + 4 * half + 0..3 and 8 more. Chunk c of column n is at c ^ ((n ^ n / 8) % 8), for reads of a chunk of
// neighbouring columns and for writes of every eighth column alike.
#pragma once

#include "kernels/prefill/gfx9/blocks.h"

namespace mla::gfx9_prefill {

// Columns 32 * tile + l % 32 of keys 16 * step + 4 * half + 0..3 and 8 more.
__device__ __forceinline__ Fragment value_fragment(LdsBytes block, int tile, int step) {
  const int lane = lane_id(), column = lane % 32;
  const int chunk = (2 * step + lane / 32) ^ (tile % 2 * 4) ^ ((column ^ column / 8) % 8);
  const LdsBytes line = block + kKeyBytes + column * kPanelLine + chunk * 16;
  return *reinterpret_cast<Lds<const Fragment>>(line + tile * 32 * kPanelLine);
}

template <class Element>
class Blocks<Gfx942, Element> {
 public:
  // `keys`: those of the request that some row sees.
  __device__ __forceinline__ Blocks(const PrefillParams& p, const Tile& tile, int32_t keys, LdsBytes memory)
      : sources_(p, tile, sizeof(Element)),
        memory_(memory),
        keys_(keys),
        next_keys_(sources_.keys),
        next_values_(sources_.values),
        key_offset_(thread() / 8 * sources_.key_stride + thread() % 8 * 16),
        value_offset_(value_pair() * 2 * sources_.value_stride + value_columns() * 16),
        key_place_(in_place(thread() / 8 * kPanelLine + (thread() % 8 ^ thread() / 8 % 8) * 16)),
        value_place_(in_place(value_place(value_pair() * 2, value_columns()))),
        value_chunk_(in_place(value_chunk(value_pair() * 2, value_columns()))) {
    if (keys > 0) load(0);
  }

  // Block number `block`, and the next one on its way. masked: see cleared.
  __device__ __forceinline__ LdsBytes take(int32_t block, bool masked, const KeyBits<kBlockKeys>& bits,
                                           int32_t& unusable) {
    if (masked) clear(block, bits, unusable);
    lds_barrier();  // all have done with the block before it
    put_keys();
    put_values();
    if ((block + 1) * kBlockKeys < keys_) load(block + 1);
    lds_barrier();
    return memory_;
  }

 private:
  __device__ __forceinline__ void clear(int32_t block, const KeyBits<kBlockKeys>& bits, int32_t& unusable) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = value_pair() * 2 + i;
      const int32_t position = block * kBlockKeys + key;
      values_[i] = cleared<Element>(values_[i], position < keys_ && bits[key], position, unusable);
    }
  }

  __device__ __forceinline__ void put_keys() const {
#pragma unroll
    for (int panel = 0; panel < kKeyPanels; ++panel) {
      *reinterpret_cast<Lds<U32x4>>(memory_ + key_place_ + panel * kPanelBytes) = keys_in_flight_[panel];
    }
  }

  __device__ __forceinline__ void put_values() const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t first = values_[0][i / 2], second = values_[1][i / 2];
      const uint32_t pair = __builtin_amdgcn_perm(second, first, i % 2 == 0 ? 0x05040100 : 0x07060302);
      const LdsBytes line = memory_ + kKeyBytes + value_place_ + i * kPanelLine;
      *reinterpret_cast<Lds<uint32_t>>(line + (value_chunk_ ^ i * 16)) = pair;
    }
  }

  __device__ __forceinline__ static int thread() { return wave_id() * kWave + lane_id(); }

  // A thread has eight columns of two neighbouring keys.
  __device__ __forceinline__ static int value_pair() { return wave_id() * 4 + lane_id() / 16; }
  __device__ __forceinline__ static int value_columns() { return lane_id() % 16; }  // / 8

  // Where they go, in bytes: in the line of the first column, the chunk apart.
  __device__ __forceinline__ static int value_place(int key, int columns) {
    return columns * 8 * kPanelLine + key / 8 % 2 * 8 + key % 4 * 2;
  }
  __device__ __forceinline__ static int value_chunk(int key, int columns) {
    return ((key / 16 * 2 + key / 4 % 2) ^ columns % 8) * 16;
  }

  // Blocks come in order.
  __device__ __forceinline__ void load(int32_t block) {
    if ((block + 1) * kBlockKeys > keys_) return load_last(keys_ - 1 - block * kBlockKeys);
    load_at(key_offset_, value_offset_, value_offset_ + sources_.value_stride);
    next_keys_ += kBlockKeys * sources_.key_stride;
    next_values_ += kBlockKeys * sources_.value_stride;
  }

  // Keys behind the last one of the block are that one again; nobody sees them.
  __device__ __forceinline__ void load_last(int32_t last) {
    const int lane = in_place(lane_id()), thread = wave_id() * kWave + lane, key = wave_id() * 8 + lane / 16 * 2;
    const uint32_t first = clamp(key, 0, last), second = clamp(key + 1, 0, last), columns = lane % 16 * 16;
    load_at(static_cast<uint32_t>(clamp(thread / 8, 0, last)) * sources_.key_stride + thread % 8 * 16,
            first * sources_.value_stride + columns, second * sources_.value_stride + columns);
  }

  // Offsets: of this lane, from the block's first key.
  __device__ __forceinline__ void load_at(uint32_t key_offset, uint32_t first_offset, uint32_t second_offset) {
#pragma unroll
    for (int panel = 0; panel < kKeyPanels; ++panel) {
      keys_in_flight_[panel] = *reinterpret_cast<const U32x4*>(next_keys_ + key_offset + panel * kPanelLine);
    }
    values_[0] = *reinterpret_cast<const U32x4*>(next_values_ + first_offset);
    values_[1] = *reinterpret_cast<const U32x4*>(next_values_ + second_offset);
  }

  Sources sources_;
  LdsBytes memory_;
  int32_t keys_;
  const unsigned char* next_keys_;  // of the next block
  const unsigned char* next_values_;
  uint32_t key_offset_, value_offset_;  // of this lane, from a block's first key
  int key_place_, value_place_, value_chunk_;
  U32x4 keys_in_flight_[kKeyPanels];
  U32x4 values_[2];
};

}  // namespace mla::gfx9_prefill
