// The geometry of the Hopper decode kernel over fp8 caches: its warps, and where things lie in shared memory.
// docs/hopper.md explains both.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "kernels/decode/work.cuh"
#include "kernels/params.h"

namespace mla::sm90::fp8 {

constexpr int kGroupWarps = 4;  // a warpgroup
constexpr int kGroupThreads = 32 * kGroupWarps;
constexpr int kOutputGroups = 2;
constexpr int kOutputWarps = kOutputGroups * kGroupWarps;

// A block of keys: 64 tokens in eight groups of eight, a group being what the swizzles and ldmatrix work on. The latent
// comes in four chunks of 128 columns, a line of 128 bytes a token, each group with its four chunks; behind it the rope
// keys, a line of 64 bytes a token. Both are swizzled by the copy engine.
constexpr int kGroupTokens = 8;
constexpr int kTokenGroups = kBlockTokens / kGroupTokens;
constexpr int kLineBytes = 128;
constexpr int kLatentChunks = kLatent / kLineBytes;
constexpr int kChunkBytes = kGroupTokens * kLineBytes;
constexpr int kLatentGroupBytes = kLatentChunks * kChunkBytes;
constexpr int kRopeGroupBytes = kGroupTokens * kRope;
constexpr int kRopeOffset = kTokenGroups * kLatentGroupBytes;
constexpr int kSlotBytes = kRopeOffset + kTokenGroups * kRopeGroupBytes;
static_assert(kSlotBytes == kBlockTokens * kWidth);

// What the products multiply: chunks of 64 columns, which in fp16 are lines of 128 bytes too, 16 at a time.
constexpr int kProductColumns = kLineBytes / 2;
constexpr int kProductDepth = 16;
constexpr int kQueryChunks = kWidth / kProductColumns;
constexpr int kGroupChunks = kLatent / kProductColumns / kOutputGroups;  // of an output warpgroup

constexpr size_t kSharedLimit = 227 * 1024;

// Named barriers, besides __syncthreads' 0.
constexpr int kStartBarrier = 1;   // all threads
constexpr int kScoreBarrier = 2;   // the score warps
constexpr int kOutputBarrier = 3;  // and 4: an output warpgroup each
constexpr int kGroupBarrier = 5;   // and 6: a score warpgroup each
constexpr int kTurnBarrier = 7;    // and 8: the score warps, one warpgroup waits

// What the loading warp says of a block.
struct BlockInfo {
  int32_t tokens;   // from its first to the request's last; 64 and more: all of them
  int32_t visible;  // from its first to the last that all rows see; 64 and more: all of them
  uint32_t flags;
};
constexpr uint32_t kAllGroups = 0xFF;  // a bit for each eight tokens: their page is in the cache
constexpr uint32_t kLast = 0x100;      // of its item
constexpr uint32_t kStop = 0x200;      // there is no block, and none will come

// Small things in shared memory, behind the large ones.
template <int kRows, int kScoreGroups, int kSlots>
struct alignas(16) ControlOf {
  // A token's score with a row is factor * (its product) in base 2, and weighs 2^(score - reference).
  alignas(8) float factor[kRows];
  float reference[kRows];
  float by_warp[kScoreGroups][kGroupWarps][kRows];  // maxima of a block's scores, or sums of an item's weights
  float rescale[2][kRows];
  float inverse[kRows];        // what the output is multiplied by: k_scale / sum of the weights
  int32_t visible_end[kRows];  // first key that a row does not see
  Tile tile;                   // the item whose turn it is; rows 0: there is none
  Tile finished;               // the item that sums_full speaks of
  BlockInfo blocks[kSlots];
  float k_scale;
  uint32_t rescaled[2];  // with a block's weights: the output so far is multiplied by `rescale` first (wide: a bit)

  // mbarriers
  uint64_t full[kSlots];
  uint64_t empty[kSlots];
  uint64_t tile_full, tile_empty;
  uint64_t weights_full[2], weights_empty[2];
  uint64_t sums_full, sums_empty;
};

template <int kTileRows>
struct Shape {
  static constexpr int kRows = kTileRows;  // on the N side of both products
  static constexpr int kRowGroups = kRows / 8;
  static_assert(kRows % 8 == 0 && kRows <= 64);

  // Two warpgroups share the scores where the registers allow: they take the even and the odd blocks of an item.
  static constexpr int kScoreGroups = kRows <= 48 ? 2 : 1;
  static constexpr int kScoreWarps = kScoreGroups * kGroupWarps;
  static constexpr int kScoreThreads = 32 * kScoreWarps;
  static constexpr int kKeyWarp = kScoreWarps + kOutputWarps;
  static constexpr int kItemWarp = kKeyWarp + 1;
  static constexpr int kThreads = 32 * (kKeyWarp + kGroupWarps);  // setmaxnreg is for whole warpgroups
  static constexpr int kSlotReaders = kGroupWarps + kOutputWarps;

  // Registers a thread: at the launch, what five or four warpgroups may have, and then by role, together no more.
  static constexpr int kLaunchRegisters = kScoreGroups == 2 ? 96 : 128;
  static constexpr int kLoadRegisters = 32;
  static constexpr int kScoreRegisters = kRows <= 32 ? 96 : kRows <= 40 ? 88 : kRows <= 48 ? 80 : 128;
  static constexpr int kOutputRegisters = kRows <= 32 ? 128 : kRows <= 40 ? 136 : kRows <= 48 ? 144 : 176;
  static_assert(kLoadRegisters + kScoreGroups * kScoreRegisters + kOutputGroups * kOutputRegisters <=
                kThreads / kGroupThreads * kLaunchRegisters);

  static constexpr int kQueryBatch = kRows <= 24 ? 3 : 2;  // rows that a warp has on their way at once, at most

  // Products that are issued together, while the left operands of the next ones are made, in so many buffers: what the
  // registers allow.
  static constexpr int kProducts = 2;
  static constexpr int kLoads = kProducts / 2;  // of matrices, four at a time, that bring their left operands
  static constexpr int kScoreBuffers = 2;
  static constexpr int kOutputBuffers = kRows == 48 ? 1 : 2;

  // A slot of the ring is a block.
  static constexpr int kBlockSlots = 1;
  static constexpr int kSlotGroups = kTokenGroups;
  static constexpr int kRopeOffset = fp8::kRopeOffset;
  static constexpr int kSlotBytes = fp8::kSlotBytes;
  using RopeElement = __half;  // that the products of the rope keys multiply
  static constexpr int kQueryChunkBytes = kRows * kLineBytes;
  static constexpr int kQueryBytes = kQueryChunks * kQueryChunkBytes;
  static constexpr int kWeightBytes = kRows * kLineBytes;  // of a block
  template <int kSlots>
  static constexpr size_t shared_bytes_with() {
    return size_t{kSlots} * kSlotBytes + kQueryBytes + 2 * kWeightBytes +
           sizeof(ControlOf<kRows, kScoreGroups, kSlots>);
  }
  static constexpr int kSlots = shared_bytes_with<5>() <= kSharedLimit   ? 5
                                : shared_bytes_with<4>() <= kSharedLimit ? 4
                                                                         : 3;
  static constexpr size_t kSharedBytes = shared_bytes_with<kSlots>();
  static_assert(kSharedBytes <= kSharedLimit);

  // Where things lie.
  static constexpr int kQueryOffset = kSlots * kSlotBytes;
  static constexpr int kWeightOffset = kQueryOffset + kQueryBytes;
  static constexpr int kControlOffset = kWeightOffset + 2 * kWeightBytes;
};

template <class Shape>
using Control = ControlOf<Shape::kRows, Shape::kScoreGroups, Shape::kSlots>;

// Copy engine's view of the cache, innermost axis first. Groups of eight tokens are numbered through all pages and
// layers.
struct TensorMaps {
  CUtensorMap latent;  // [column in chunk, token in group, chunk, group]
  CUtensorMap rope;    // [column, token in group, group]
};

// Groups of one copy: a page holds a whole number of them, a slot too.
__host__ __device__ constexpr int32_t copied_groups(int32_t page_size, int32_t slot_groups) {
  const int32_t groups = page_size / kGroupTokens;
  return groups % 8 == 0 && slot_groups % 8 == 0 ? 8 : groups % 4 == 0 ? 4 : groups % 2 == 0 ? 2 : 1;
}

// A position in the ring of slots, and the parity of the barriers of its current round.
template <class Shape>
struct Ring {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == Shape::kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Blocks of a tile; at least one, so that an item without keys (of a stale plan) writes its empty rows all the same.
__device__ __forceinline__ int32_t block_count(const Tile& tile) {
  return ceil_div(max_of(tile.kv_end - tile.kv_begin, 1), kBlockTokens);
}

}  // namespace mla::sm90::fp8
