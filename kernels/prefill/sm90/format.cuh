// The element types of an instance, and what follows from them for shared memory.
#pragma once

#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/prefill/sm90/shape.h"

#if !defined(MLA_PREFILL_CLOSED_WAIT)
#define MLA_PREFILL_CLOSED_WAIT 1
#endif

namespace mla::sm90_prefill {

// Of the attending warps, and of the one that brings keys and values.
__device__ __forceinline__ void await_barrier(uint32_t barrier, uint32_t parity) {
  MLA_PREFILL_CLOSED_WAIT ? ptx::mbarrier_wait_closed(barrier, parity) : ptx::mbarrier_wait(barrier, parity);
}

// Arrays lie in chunks of 64 columns, a line for each token: of 128 bytes, or of 64 in e4m3. But values in e4m3 come in
// the tiles that kValueTile describes, 8 a block.
template <class KeyElement, class ValueElement>
struct Format {
  using Key = KeyElement;  // and the queries'
  using Value = ValueElement;
  using Result = std::conditional_t<sizeof(KeyElement) == 1, __nv_bfloat16, Key>;

  static constexpr bool kFp8Keys = sizeof(Key) == 1, kFp8Values = sizeof(Value) == 1;

  // A request's blocks begin where its keys do, or up to 15 keys before, where a tile does.
  static constexpr int kKeyAlignment = kFp8Values ? kValueTile : 1;
  static __device__ __forceinline__ int32_t origin(int32_t kv_begin) {
    return kv_begin / kKeyAlignment * kKeyAlignment;
  }

  // Weights are at most 1. Multiplied with 2^8, those above 2^-14 of the largest are normal numbers of e4m3.
  static constexpr int kWeightShift = kFp8Values ? 8 : 0;

  // Products take 32 bytes of a line at once, of 16-bit elements and of e4m3.
  static constexpr int kKeyLine = kChunkColumns * sizeof(Key);
  static constexpr int kLineSteps = kKeyLine / 32;
  static constexpr int kKeySteps = kKeyChunks * kLineSteps;
  static constexpr int kWeightSteps = kBlockKeys * sizeof(Value) / 32;

  static constexpr int kQueryChunkBytes = kGroupQueries * kKeyLine;
  static constexpr int kQueryBytes = kKeyChunks * kQueryChunkBytes;  // of a group
  static constexpr int kKeyChunkBytes = kBlockKeys * kKeyLine;
  static constexpr int kKeyBytes = kKeyChunks * kKeyChunkBytes;
  static constexpr int kValueChunkBytes = kBlockKeys * kChunkColumns * sizeof(Value);
  static constexpr int kValueTileBytes = kNope * kValueTile;
  static constexpr int kValueBytes = kBlockKeys * kNope * sizeof(Value);

  static constexpr int kStages = kFp8Values ? 4 : kFp8Keys ? 3 : 2;  // blocks of keys, and of values, in shared memory
  static_assert(kStages <= kMostStages);

  // Offsets from the start of shared memory.
  static constexpr int kKeysAt = 0;
  static constexpr int kValuesAt = kKeysAt + kStages * kKeyBytes;
  static constexpr int kQueriesAt = kValuesAt + kStages * kValueBytes;
  static constexpr int kControlAt = kQueriesAt + kGroups * kQueryBytes;
  static constexpr size_t kSharedBytes = kControlAt + sizeof(Control);
  static_assert(kSharedBytes <= 227 * 1024);
};

// Blocks whose values are cleared: those of which some query does not see all keys.
template <class Format, bool kKeyMask>
__device__ __forceinline__ bool is_cleared(const Tile& tile, int32_t block) {
  const bool starts_before = Format::kKeyAlignment > 1 && block == 0 && tile.kv_begin % Format::kKeyAlignment != 0;
  return kKeyMask || (tile.careful != 0 && (starts_before || block >= tile.whole_blocks));
}

}  // namespace mla::sm90_prefill
