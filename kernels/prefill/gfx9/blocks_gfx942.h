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
      : sources_(p, tile, sizeof(Element)), memory_(memory), keys_(keys) {
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
    const int thread = wave_id() * kWave + lane_id(), row = thread / 8;
    const LdsBytes line = memory_ + row * kPanelLine + (thread % 8 ^ row % 8) * 16;
#pragma unroll
    for (int panel = 0; panel < kKeyPanels; ++panel) {
      *reinterpret_cast<Lds<U32x4>>(line + panel * kPanelBytes) = keys_in_flight_[panel];
    }
  }

  // A thread has eight columns of two neighbouring keys.
  __device__ __forceinline__ static int value_pair() { return wave_id() * 4 + lane_id() / 16; }
  __device__ __forceinline__ static int value_columns() { return lane_id() % 16; }  // / 8

  __device__ __forceinline__ void put_values() {
    const int key = value_pair() * 2, columns = value_columns();
    const int chunk = key / 16 * 2 + key / 4 % 2, place = key / 8 % 2 * 8 + key % 4 * 2;
    const LdsBytes lines = memory_ + kKeyBytes + columns * 8 * kPanelLine + place;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t first = values_[0][i / 2], second = values_[1][i / 2];
      const uint32_t pair = __builtin_amdgcn_perm(second, first, i % 2 == 0 ? 0x05040100 : 0x07060302);
      *reinterpret_cast<Lds<uint32_t>>(lines + i * kPanelLine + (chunk ^ i ^ columns % 8) * 16) = pair;
    }
  }

  // Keys behind the last one are that one again; nobody sees them.
  __device__ __forceinline__ void load(int32_t block) {
    const int thread = wave_id() * kWave + lane_id();
    const int64_t position = int64_t{block} * kBlockKeys;
    const int32_t last = keys_ - 1 - block * kBlockKeys;
    const unsigned char* keys = sources_.keys + position * sources_.key_stride;
    const unsigned char* values = sources_.values + position * sources_.value_stride;
    const uint32_t key_offset =
        static_cast<uint32_t>(clamp(thread / 8, 0, last)) * sources_.key_stride + thread % 8 * 16;
#pragma unroll
    for (int panel = 0; panel < kKeyPanels; ++panel) {
      keys_in_flight_[panel] = *reinterpret_cast<const U32x4*>(keys + key_offset + panel * kPanelLine);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t offset =
          static_cast<uint32_t>(clamp(value_pair() * 2 + i, 0, last)) * sources_.value_stride + value_columns() * 16;
      values_[i] = *reinterpret_cast<const U32x4*>(values + offset);
    }
  }

  Sources sources_;
  LdsBytes memory_;
  int32_t keys_;
  U32x4 keys_in_flight_[kKeyPanels];
  U32x4 values_[2];
};

}  // namespace mla::gfx9_prefill
