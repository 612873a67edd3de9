// The Hopper decode kernel's geometry: its warps, and where things lie in shared memory. docs/hopper.md explains both.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "kernels/decode/work.cuh"
#include "kernels/params.h"

namespace mla::sm90 {

constexpr int kGroupWarps = 4;  // a warpgroup
constexpr int kGroupThreads = 32 * kGroupWarps;

// Warps by role, those of a role in whole warpgroups, since registers are handed out to warpgroups: first the scores,
// then the output, then the loads.
constexpr int kOutputGroups = 2;  // share each block's columns
constexpr int kOutputWarps = kOutputGroups * kGroupWarps;

// A block of keys is nine chunks of 64 columns, eight of the latent and one of the rope key; a chunk is a line of 128
// bytes for each token. Three chunks travel together and fill one slot of the ring.
constexpr int kLineBytes = 128;
constexpr int kChunkColumns = kLineBytes / 2;
constexpr int kChunks = kWidth / kChunkColumns;
constexpr int kLatentChunks = kLatent / kChunkColumns;
constexpr int kChunkBytes = kBlockTokens * kLineBytes;
constexpr int kSlotChunks = 3;
constexpr int kSlotBytes = kSlotChunks * kChunkBytes;
constexpr int kBlockSlots = kChunks / kSlotChunks;

// Named barriers, besides __syncthreads' 0.
constexpr int kStartBarrier = 1;  // all threads
constexpr int kGroupBarrier = 2;  // and 3: the warps of score group 0, 1
constexpr int kTurnBarrier = 4;   // and 5: score group 0, 1 may move the references, which the other one has done
constexpr int kItemBarrier = 6;   // all score warps

// What the score warps tell the output warps, and each other, about a block.
enum Message : uint32_t {
  kRescale = 1,  // the output is multiplied by `rescale` first
  kLast = 2,     // of its item: after it, `sums_full` brings what normalises the output, and where that goes
  kStop = 4,     // there is no block, and none will come
  kUnset = 8,    // some row has not seen a key yet
};

template <int kTileRows>
struct Shape {
  static constexpr int kRows = kTileRows;  // on the N side of both products
  static constexpr int kRowGroups = kRows / 8;
  static constexpr int kQueryChunkBytes = kRows * kLineBytes;
  static constexpr int kQueryBytes = kChunks * kQueryChunkBytes;
  static constexpr int kSlots = kRows <= 24 ? 8 : 7;  // what shared memory holds

  // The score groups take the blocks in turn, so that one multiplies while the other weighs.
  static constexpr int kScoreGroups = 2;
  static constexpr int kScoreWarps = kScoreGroups * kGroupWarps;
  static constexpr int kKeyWarp = kScoreWarps + kOutputWarps;
  static constexpr int kQueryWarp = kKeyWarp + 1;
  static constexpr int kThreads = 32 * (kKeyWarp + kGroupWarps);

  // Registers a thread by role. A thread of the output warps holds 2 * kRows sums.
  static constexpr int kLaunchRegisters = 96;  // of all threads, at the start
  static constexpr int kScoreRegisters = 88;
  static constexpr int kOutputRegisters = 128;
  static constexpr int kLoadRegisters = 40;

  static_assert(kScoreGroups * kScoreRegisters + kOutputGroups * kOutputRegisters + kLoadRegisters <=
                    kThreads / kGroupThreads * kLaunchRegisters,
                "a CTA cannot have more than it was launched with");
  static_assert(kRows % 8 == 0 && kRows <= 48);
  // A block's last slot is then one that the output warps gave back after they had read what concerned the block two
  // before: so two buffers of `rescale` and `message` need no barrier of their own.
  static_assert(kSlots < 3 * kBlockSlots, "the ring holds less than three blocks");
  static_assert(kSlots >= kScoreGroups * kBlockSlots, "each score group has a block");
};

// An item for the score warps.
template <class Shape>
struct Queries {
  Tile tile;                          // rows 0: there is none, and none will come
  int32_t visible_end[Shape::kRows];  // first key that a row does not see
};

// Small things in shared memory, behind the ring and the queries.
template <class Shape>
struct alignas(16) Control {
  float highest[kGroupWarps][Shape::kRows];  // score of a block's tokens, by warp
  float references[Shape::kRows];            // of the exponents, in base 2; -inf: no key seen yet
  float moved[Shape::kRows];                 // by how much a block moved them
  float rescale[2][Shape::kRows];            // 2^-moved, of blocks in turn
  float sums[Shape::kScoreWarps][Shape::kRows];
  float inverse[Shape::kRows];  // of the sum of the weights
  Queries<Shape> queries[2];    // of items in turn
  uint32_t messages[2];
  uint32_t valid_pages[Shape::kSlots];  // of the block that begins in this slot: a bit a page
  Tile finished;                        // the item that sums_full speaks of

  // mbarriers
  uint64_t full[Shape::kSlots];
  uint64_t empty[Shape::kSlots];
  uint64_t query_full, query_empty;
  uint64_t weights_full[2];
  uint64_t sums_full, sums_empty;
};

// Copy engine's view of the arrays, innermost axis first.
struct TensorMaps {
  CUtensorMap keys;      // [column in chunk, token in page, chunk, page, layer]
  CUtensorMap q_latent;  // [column in chunk, row, chunk]
  CUtensorMap q_rope;    // [column in chunk, row, 1]
};

template <class Shape>
constexpr size_t shared_bytes() {
  constexpr size_t kLimit = 227 * 1024;
  constexpr size_t kBytes = Shape::kSlots * kSlotBytes + Shape::kQueryBytes + sizeof(Control<Shape>);
  static_assert(kBytes <= kLimit);
  return kBytes;
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

  // Past `blocks` blocks.
  __device__ __forceinline__ void skip(int32_t blocks) {
    const auto steps = static_cast<uint32_t>(slot) + static_cast<uint32_t>(blocks) * kBlockSlots;
    slot = static_cast<int>(steps % Shape::kSlots);
    parity ^= steps / Shape::kSlots & 1;
  }

  __device__ __forceinline__ int slot_after(int steps) const {
    const int later = slot + steps;
    return later >= Shape::kSlots ? later - Shape::kSlots : later;
  }
};

// Blocks of a tile; at least one, so that an item without keys (of a stale plan) writes its empty rows all the same.
__device__ __forceinline__ int32_t block_count(const Tile& tile) {
  return ceil_div(max_of(tile.kv_end - tile.kv_begin, 1), kBlockTokens);
}

}  // namespace mla::sm90
