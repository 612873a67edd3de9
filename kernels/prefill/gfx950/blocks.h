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
 public:
  // `keys`: those of the request that some row sees, up to the piece's end.
  __device__ __forceinline__ Blocks(const PrefillParams& p, const Tile& tile, int32_t keys, LdsBytes memory)
      : sources_(p, tile, 1), memory_(memory), keys_(keys) {}

  // Of 8-bit blocks `begin` is the first.
  __device__ __forceinline__ void start(int32_t begin) const {
    if (begin * kBlockKeys < keys_) load(begin);
  }

  // Block number `block`, and the next one on its way. masked: see cleared.
  __device__ __forceinline__ LdsBytes take(int32_t block, bool masked, const KeyBits<kBlockKeys>& bits,
                                           int32_t& unusable) const {
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

  // A wave brings 16 keys: of each panel 16 lines of four chunks. Keys behind the last one are that one again; nobody
  // sees them.
  __device__ __forceinline__ void load(int32_t block) const {
    constexpr int kWaveKeys = kBlockKeys / kWaves;
    static_assert(kWaveKeys * kPanelLine == kWave * 16);
    const int lane = in_place(lane_id()), row = lane / 4, first = wave_id() * kWaveKeys;
    const LdsBytes target = memory_ + block % kStages * kBlockBytes + first * kPanelLine;
    const int64_t position = int64_t{block} * kBlockKeys;
    const unsigned char* keys = sources_.keys + position * sources_.key_stride;
    const unsigned char* values = sources_.values + position * sources_.value_stride;
    const auto key = static_cast<uint32_t>(clamp(first + row, 0, keys_ - 1 - block * kBlockKeys));
    const uint32_t chunk = ((lane % 4) ^ swizzle(row)) * 16;
#pragma unroll
    for (int panel = 0; panel < kKeyPanels; ++panel) {
      copy_to_lds(keys + panel * kPanelLine, key * sources_.key_stride + chunk, target + panel * kPanelBytes);
    }
#pragma unroll
    for (int panel = 0; panel < kValuePanels; ++panel) {
      copy_to_lds(values + panel * kPanelLine, key * sources_.value_stride + chunk,
                  target + kKeyBytes + panel * kPanelBytes);
    }
  }

  Sources sources_;
  LdsBytes memory_;
  int32_t keys_;
};

}  // namespace mla::gfx9_prefill::fp8
