// gfx950: memory to LDS without registers, values read out of LDS transposed.
//
// Values lie in panels as keys do, with chunk c of line r at c ^ (2 * (r % 4)): a transposing read takes 32 bytes of
// four neighbouring keys.
#pragma once

#include "kernels/prefill/gfx9/blocks.h"

namespace mla::gfx9_prefill {

// Columns 32 * tile + l % 32 of keys 16 * step + 4 * half + 0..3 and 8 more.
__device__ __forceinline__ Fragment value_fragment(LdsBytes block, int tile, int step) {
  const int lane = lane_id(), row = lane % 16 / 4;
  const int chunk = (tile % 2 * 4 + lane / 16 % 2 * 2 + lane % 4 / 2) ^ (2 * row);
  const LdsBytes line = block + kKeyBytes + (lane / 32 * 4 + row) * kPanelLine + chunk * 16 + lane % 2 * 8;
  const LdsBytes first = line + tile / 2 * kPanelBytes + 16 * step * kPanelLine;
  const U32x2 low = lds_read_transposed(first), high = lds_read_transposed(first + 8 * kPanelLine);
  return {low.x, low.y, high.x, high.y};
}

template <class Element>
class Blocks<Gfx950, Element> {
  static constexpr int kWaveKeys = kBlockKeys / Gfx950::kWaves;

 public:
  // `keys`: those of the request that some row sees.
  __device__ __forceinline__ Blocks(const PrefillParams& p, const Tile& tile, int32_t keys, LdsBytes memory)
      : sources_(p, tile, sizeof(Element)),
        memory_(memory),
        keys_(keys),
        next_keys_(sources_.keys + wave_id() * kWaveKeys * sources_.key_stride),
        next_values_(sources_.values + wave_id() * kWaveKeys * sources_.value_stride),
        key_offset_(lane_id() / 8 * sources_.key_stride + key_chunk(lane_id()) * 16),
        value_offset_(lane_id() / 8 * sources_.value_stride + value_chunk(lane_id()) * 16) {
    if (keys > 0) load(0);
  }

  // Block number `block`, and the next one on its way. masked: see cleared.
  __device__ __forceinline__ LdsBytes take(int32_t block, bool masked, const KeyBits<kBlockKeys>& bits,
                                           int32_t& unusable) {
    wait_for_loads<0>();
    lds_barrier();  // the block is here for everyone, and everyone has done with the one before it
    if ((block + 1) * kBlockKeys < keys_) load(block + 1);
    const LdsBytes memory = memory_ + block % 2 * kBlockBytes;
    if (masked) clear(memory + kKeyBytes, block, bits, unusable);
    return memory;
  }

 private:
  __device__ __forceinline__ void clear(LdsBytes values, int32_t block, const KeyBits<kBlockKeys>& bits,
                                        int32_t& unusable) const {
    constexpr int kLanes = Gfx950::kWaves * kWave / kBlockKeys;  // threads of a key
    const int thread = wave_id() * kWave + in_place(lane_id()), key = thread / kLanes;
    const int32_t position = block * kBlockKeys + key;
    const bool used = position < keys_ && bits[key];
    const LdsBytes line = values + key * kPanelLine + thread % kLanes * 16;
#pragma unroll
    for (int panel = 0; panel < kValuePanels; ++panel) {
#pragma unroll
      for (int i = 0; i < kPanelLine / 16 / kLanes; ++i) {
        auto* chunk = reinterpret_cast<Lds<U32x4>>(line + panel * kPanelBytes + i * kLanes * 16);
        *chunk = cleared<Element>(*chunk, used, position, unusable);
      }
    }
    lds_barrier();
  }

  // A wave brings 16 keys, 8 at once: of each panel eight lines of eight chunks. Blocks come in order.
  __device__ __forceinline__ void load(int32_t block) {
    const LdsBytes target = memory_ + block % 2 * kBlockBytes + wave_id() * kWaveKeys * kPanelLine;
    if ((block + 1) * kBlockKeys > keys_) return load_last(block, target);
#pragma unroll
    for (int part = 0; part < kWaveKeys; part += 8) {
      load_keys(target + part * kPanelLine, next_keys_ + part * sources_.key_stride, key_offset_,
                next_values_ + part * sources_.value_stride, value_offset_);
    }
    next_keys_ += kBlockKeys * sources_.key_stride;
    next_values_ += kBlockKeys * sources_.value_stride;
  }

  // Keys behind the last one are that one again; nobody sees them.
  __device__ __forceinline__ void load_last(int32_t block, LdsBytes target) const {
    const int lane = in_place(lane_id());
    const int64_t position = int64_t{block} * kBlockKeys;
#pragma unroll
    for (int part = 0; part < kWaveKeys; part += 8) {
      const uint32_t key = clamp(wave_id() * kWaveKeys + part + lane / 8, 0, keys_ - 1 - block * kBlockKeys);
      load_keys(target + part * kPanelLine, sources_.keys + position * sources_.key_stride,
                key * sources_.key_stride + key_chunk(lane) * 16, sources_.values + position * sources_.value_stride,
                key * sources_.value_stride + value_chunk(lane) * 16);
    }
  }

  // Which chunk of its line a lane brings: the one that belongs where it writes.
  __device__ __forceinline__ static uint32_t key_chunk(int lane) { return lane % 8 ^ lane / 8; }
  __device__ __forceinline__ static uint32_t value_chunk(int lane) { return lane % 8 ^ (2 * (lane / 8 % 4)); }

  // Eight lines of each panel. Offsets: of a lane.
  __device__ __forceinline__ static void load_keys(LdsBytes target, const unsigned char* keys, uint32_t key_offset,
                                                   const unsigned char* values, uint32_t value_offset) {
#pragma unroll
    for (int panel = 0; panel < kKeyPanels; ++panel) {
      copy_to_lds(keys, key_offset + panel * kPanelLine, target + panel * kPanelBytes);
    }
#pragma unroll
    for (int panel = 0; panel < kValuePanels; ++panel) {
      copy_to_lds(values, value_offset + panel * kPanelLine, target + kKeyBytes + panel * kPanelBytes);
    }
  }

  Sources sources_;
  LdsBytes memory_;
  int32_t keys_;
  const unsigned char* next_keys_;  // of this wave, in the next whole block
  const unsigned char* next_values_;
  uint32_t key_offset_, value_offset_;  // of this lane's chunks, from the first of eight keys
};

}  // namespace mla::gfx9_prefill
