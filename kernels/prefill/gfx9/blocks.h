// Blocks of keys and values on their way into LDS, and fragments of them out of it.
//
// Keys lie in panels of 64 columns, a line of eight 16-byte chunks a key; chunk c of line r is at c ^ (r % 8), so that
// eight lanes that read a chunk of eight keys meet every bank once.
#pragma once

#include "kernels/prefill/gfx9/matrix.h"
#include "kernels/prefill/gfx9/tile.h"

namespace mla::gfx9_prefill {

constexpr int kBlockSteps = kBlockKeys / 16;  // of the contraction over keys
constexpr int kKeySteps = kHeadDim / 16;      // of the one over a key's columns
constexpr int kScoreTiles = kBlockKeys / 32;
constexpr int kValueTiles = kNope / 32;

// Where a tile's operands are in memory, in bytes.
struct Sources {
  const unsigned char* keys;  // of the request's first key, of this head
  const unsigned char* values;
  uint32_t key_stride, value_stride;  // from a token to the next

  // element_bytes: of keys and values alike
  __device__ __forceinline__ Sources(const PrefillParams& p, const Tile& tile, int element_bytes) {
    const int64_t first_row = int64_t{tile.kv_begin} * p.heads + tile.head;
    keys = static_cast<const unsigned char*>(p.k) + first_row * kHeadDim * element_bytes;
    values = static_cast<const unsigned char*>(p.v) + (p.v_offset + first_row * p.v_stride) * element_bytes;
    key_stride = static_cast<uint32_t>(p.heads * kHeadDim * element_bytes);
    value_stride = static_cast<uint32_t>(p.heads * p.v_stride * element_bytes);
  }
};

// How blocks come: kernels/prefill/gfx9/blocks_gfx950.h and blocks_gfx942.h.
template <class Architecture, class Element>
class Blocks;

// A step's 16 columns of 32 keys: row l % 32 is key 32 * tile + l % 32, its columns 16 * step + 8 * half and on.
__device__ __forceinline__ Fragment key_fragment(LdsBytes block, int tile, int step) {
  const int lane = lane_id();
  const int chunk = (2 * (step % 4) + lane / 32) ^ (lane % 8);
  const LdsBytes line = block + lane % 32 * kPanelLine + chunk * 16;
  return *reinterpret_cast<Lds<const Fragment>>(line + step / 4 * kPanelBytes + tile * 32 * kPanelLine);
}

// What is not finite becomes 0, of elements side by side.
template <class Element>
__device__ __forceinline__ uint32_t finite(uint32_t word) {
  if constexpr (sizeof(Element) == 1) {  // NaN is all ones below the sign
    const uint32_t nan = ((word & 0x7F7F7F7F) + 0x01010101) >> 7 & 0x01010101;
    return word & ~(nan * 0xFF);
  }
  constexpr uint32_t kExponent = std::is_same_v<Element, F16> ? 0x7C00 : 0x7F80;
  const uint32_t low = (word & kExponent) == kExponent ? 0 : word & 0xFFFF;
  const uint32_t high = (word >> 16 & kExponent) == kExponent ? 0 : word & 0xFFFF0000;
  return low | high;
}

// Values of a key that some row must not see: a weight of 0 would not silence them. Where nobody uses the key they
// become zeros, else what is not finite does, and `unusable` is at most the key: the rows that see it are NaN.
template <class Element>
__device__ __forceinline__ U32x4 cleared(U32x4 values, bool used, int32_t key, int32_t& unusable) {
  if (!used) return U32x4{};
  const uint32_t x = values.x, y = values.y, z = values.z, w = values.w;
  const U32x4 kept = {finite<Element>(x), finite<Element>(y), finite<Element>(z), finite<Element>(w)};
  const bool same = kept.x == x && kept.y == y && kept.z == z && kept.w == w;
  if (!same && key < unusable) unusable = key;
  return kept;
}

}  // namespace mla::gfx9_prefill
