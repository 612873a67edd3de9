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
 public:
  // `keys`: those of the request that some row sees.
  __device__ __forceinline__ Blocks(const PrefillParams& p, const Tile& tile, int32_t keys, LdsBytes memory)
      : sources_(p, tile, sizeof(Element)), memory_(memory), keys_(keys) {
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

  // A wave brings 16 keys, 8 at once: of each panel eight lines of eight chunks. Keys behind the last one are that one
  // again; nobody sees them.
  __device__ __forceinline__ void load(int32_t block) const {
    constexpr int kWaveKeys = kBlockKeys / Gfx950::kWaves;
    const int lane = in_place(lane_id()), row = lane / 8, first = wave_id() * kWaveKeys;
    const LdsBytes target = memory_ + block % 2 * kBlockBytes + first * kPanelLine;
    const int64_t position = int64_t{block} * kBlockKeys;
    const unsigned char* keys = sources_.keys + position * sources_.key_stride;
    const unsigned char* values = sources_.values + position * sources_.value_stride;
    const int32_t last = keys_ - 1 - block * kBlockKeys;
#pragma unroll
    for (int part = 0; part < kWaveKeys / 8; ++part) {
      const auto key = static_cast<uint32_t>(clamp(first + part * 8 + row, 0, last));
      const uint32_t key_offset = key * sources_.key_stride + (lane % 8 ^ row) * 16;
      const uint32_t value_offset = key * sources_.value_stride + (lane % 8 ^ (2 * (row % 4))) * 16;
#pragma unroll
      for (int panel = 0; panel < kKeyPanels; ++panel) {
        copy_to_lds(keys + panel * kPanelLine, key_offset, target + panel * kPanelBytes + part * 8 * kPanelLine);
      }
#pragma unroll
      for (int panel = 0; panel < kValuePanels; ++panel) {
        copy_to_lds(values + panel * kPanelLine, value_offset,
                    target + kKeyBytes + panel * kPanelBytes + part * 8 * kPanelLine);
      }
    }
  }

  Sources sources_;
  LdsBytes memory_;
  int32_t keys_;
};

}  // namespace mla::gfx9_prefill
