// Blocks of 8-bit keys and values on their way into LDS, and fragments of them out of it.
//
// A line of a panel has four chunks of 16 bytes. Chunk c of line r is at c ^ ((r / 2 % 4) ^ (r / 8 % 2)): eight lines
// in a row, sixteen of them, and lines 0 to 3 with 8 to 11 meet no bank twice with the same chunk.
#pragma once

#include "kernels/prefill/gfx9/blocks.h"
#include "kernels/prefill/gfx950/shape.h"

namespace mla::gfx9_prefill::fp8 {

// 32 elements a lane of a product's operand, of 64 positions of the contraction.
using Fragment = int __attribute__((ext_vector_type(8)));

constexpr int kKeySteps = kHeadDim / 64;      // of the contraction over a key's columns: panels
constexpr int kBlockSteps = kBlockKeys / 64;  // of the one over keys

__device__ __forceinline__ int swizzle(int line) { return (line / 2 % 4) ^ (line / 8 % 2); }

// Columns 64 * step + 32 * half and on of key 32 * tile + l % 32.
__device__ __forceinline__ Fragment key_fragment(LdsBytes block, int tile, int step) {
  const int lane = lane_id(), chunk = lane / 32 * 2, place = swizzle(lane % 16);
  const LdsBytes line = block + lane % 32 * kPanelLine;
  const int at = step * kPanelBytes + tile * 32 * kPanelLine;
  const U32x4 first = *reinterpret_cast<Lds<const U32x4>>(line + (chunk ^ place) * 16 + at);
  const U32x4 second = *reinterpret_cast<Lds<const U32x4>>(line + ((chunk + 1) ^ place) * 16 + at);
  return bits_as<Fragment>(__builtin_shufflevector(first, second, 0, 1, 2, 3, 4, 5, 6, 7));
}

// Column 32 * tile + l % 32 of a step's 64 keys: in byte 8 * m + q key 16 * m + 4 * half + q % 4 + q / 4 * 8, as scores
// lie. A transposing read takes a chunk of eight keys, by 16 lanes.
__device__ __forceinline__ Fragment value_fragment(LdsBytes block, int tile, int step) {
  using S32x2 = int __attribute__((ext_vector_type(2)));
  const int lane = lane_id(), q = lane % 16 / 2, key = lane / 32 * 4 + q % 4 + q / 4 * 8;
  const int chunk = (tile % 2 * 2 + lane / 16 % 2) ^ swizzle(key);
  const LdsBytes line = block + kKeyBytes + key * kPanelLine + chunk * 16 + lane % 2 * 8;
  Fragment fragment;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const int at = tile / 2 * kPanelBytes + (64 * step + 16 * m) * kPanelLine;
    const S32x2 read = __builtin_amdgcn_ds_read_tr8_b64_v2i32(reinterpret_cast<Lds<S32x2>>(line + at));
    fragment[2 * m] = read.x;
    fragment[2 * m + 1] = read.y;
  }
  return fragment;
}

class Blocks {
  static constexpr int kWaveKeys = kBlockKeys / kWaves;
  static_assert(kWaveKeys * kPanelLine == kWave * 16);

 public:
  // `keys`: those of the request that some row sees, up to the piece's end. `begin`: the first block.
  __device__ __forceinline__ Blocks(const PrefillParams& p, const Tile& tile, int32_t keys, int32_t begin,
                                    LdsBytes memory)
      : sources_(p, tile, 1),
        memory_(memory),
        keys_(keys),
        next_keys_(sources_.keys + int64_t{begin} * kBlockKeys * sources_.key_stride),
        next_values_(sources_.values + int64_t{begin} * kBlockKeys * sources_.value_stride),
        key_offset_(first_key(lane_id()) * sources_.key_stride + chunk(lane_id()) * 16),
        value_offset_(first_key(lane_id()) * sources_.value_stride + chunk(lane_id()) * 16) {
    if (begin * kBlockKeys < keys_) load(begin);
  }

  // Block number `block`, and the next one on its way. masked: see cleared.
  __device__ __forceinline__ LdsBytes take(int32_t block, bool masked, const KeyBits<kBlockKeys>& bits,
                                           int32_t& unusable) {
    wait_for_loads<0>();
    lds_barrier();  // the block is here for everyone, and everyone has done with the one before it
    if ((block + 1) * kBlockKeys < keys_) load(block + 1);
    const LdsBytes memory = memory_ + block % kStages * kBlockBytes;
    if (masked) clear(memory + kKeyBytes, block, bits, unusable);
    return memory;
  }

 private:
  __device__ __forceinline__ void clear(LdsBytes values, int32_t block, const KeyBits<kBlockKeys>& bits,
                                        int32_t& unusable) const {
    constexpr int kLanes = kThreads / kBlockKeys;  // threads of a key
    static_assert(kLanes * 16 == kPanelLine);
    const int thread = wave_id() * kWave + in_place(lane_id()), key = thread / kLanes;
    const int32_t position = block * kBlockKeys + key;
    const bool used = position < keys_ && bits[key];
#pragma unroll
    for (int panel = 0; panel < kValuePanels; ++panel) {
      auto* chunk = reinterpret_cast<Lds<U32x4>>(values + panel * kPanelBytes + thread * 16);
      *chunk = cleared<E4M3FN>(*chunk, used, position, unusable);
    }
    lds_barrier();
  }

  // Which key of a block a lane brings, and which chunk of its line: the one that belongs where it writes.
  __device__ __forceinline__ static uint32_t first_key(int lane) { return wave_id() * kWaveKeys + lane / 4; }
  __device__ __forceinline__ static uint32_t chunk(int lane) { return lane % 4 ^ swizzle(lane / 4); }

  // A wave brings 16 keys: of each panel 16 lines of four chunks. Blocks come in order.
  __device__ __forceinline__ void load(int32_t block) {
    const LdsBytes target = memory_ + block % kStages * kBlockBytes + wave_id() * kWaveKeys * kPanelLine;
    if ((block + 1) * kBlockKeys > keys_) {
      // Keys behind the last one are that one again; nobody sees them.
      const int lane = in_place(lane_id());
      const uint32_t key = clamp(first_key(lane), 0, keys_ - 1 - block * kBlockKeys);
      load_at(target, key * sources_.key_stride + chunk(lane) * 16, key * sources_.value_stride + chunk(lane) * 16);
      return;
    }
    load_at(target, key_offset_, value_offset_);
    next_keys_ += kBlockKeys * sources_.key_stride;
    next_values_ += kBlockKeys * sources_.value_stride;
  }

  // Offsets: of this lane, from the block's first key.
  __device__ __forceinline__ void load_at(LdsBytes target, uint32_t key_offset, uint32_t value_offset) const {
#pragma unroll
    for (int panel = 0; panel < kKeyPanels; ++panel) {
      copy_to_lds(next_keys_, key_offset + panel * kPanelLine, target + panel * kPanelBytes);
    }
#pragma unroll
    for (int panel = 0; panel < kValuePanels; ++panel) {
      copy_to_lds(next_values_, value_offset + panel * kPanelLine, target + kKeyBytes + panel * kPanelBytes);
    }
  }

  Sources sources_;
  LdsBytes memory_;
  int32_t keys_;
  const unsigned char* next_keys_;  // of the next block
  const unsigned char* next_values_;
  uint32_t key_offset_, value_offset_;  // of this lane, from a block's first key
};

}  // namespace mla::gfx9_prefill::fp8
