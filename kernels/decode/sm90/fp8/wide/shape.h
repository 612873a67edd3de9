// The geometry of the Hopper decode kernel over fp8 caches for wide tiles, of 64 rows: its warps, and where things lie
// in shared memory. docs/hopper.md explains both.
#pragma once

#include "kernels/decode/sm90/fp8/shape.h"

namespace mla::sm90::fp8::wide {

struct Shape {
  static constexpr int kRows = 64;  // on the N side of both products
  static constexpr int kRowGroups = kRows / 8;

  // Two warpgroups attend: both have the scores of every other block, and half of the output's columns for all blocks.
  static constexpr int kScoreGroups = 2;
  static constexpr int kScoreWarps = kScoreGroups * kGroupWarps;
  static constexpr int kScoreThreads = 32 * kScoreWarps;
  static constexpr int kKeyWarp = kScoreWarps;
  static constexpr int kItemWarp = kKeyWarp + 1;
  static constexpr int kThreads = 32 * (kKeyWarp + kGroupWarps);  // setmaxnreg is for whole warpgroups
  static constexpr int kSlotReaders = kScoreWarps;

  // Registers a thread: of all at the launch, and then by role. One that attends holds 128 sums of the output.
  static constexpr int kLaunchRegisters = 168;
  static constexpr int kAttendRegisters = 240;
  static constexpr int kLoadRegisters = 24;
  static_assert(kLoadRegisters + kScoreGroups * kAttendRegisters <= kThreads / kGroupThreads * kLaunchRegisters);

  static constexpr int kQueryBatch = 4;  // rows that a warp has on their way at once
  static constexpr int kProducts = 2;    // that are issued together, as the narrow tiles'
  static constexpr int kLoads = kProducts / 2;
  static constexpr int kScoreBuffers = 2;
  static constexpr int kOutputBuffers = 2;
  static constexpr int kStepsAhead = 2;  // of the output, whose bytes are fetched

  // A slot is half a block, 32 tokens: what one ldmatrix of the output takes, so that it is given back when a block's
  // products are half done.
  static constexpr int kBlockSlots = 2;
  static constexpr int kSlotGroups = kTokenGroups / kBlockSlots;
  static constexpr int kSlotTokens = kSlotGroups * kGroupTokens;
  static constexpr int kRopeOffset = kSlotGroups * kLatentGroupBytes;
  static constexpr int kSlotBytes = kRopeOffset + kSlotGroups * kRopeGroupBytes;
  // While one warpgroup scores a block, the other may still be at the two before.
  static constexpr int kSlots = 7;
  static_assert(kSlots >= 3 * kBlockSlots);

  using RopeElement = __half;  // that the products of the rope keys multiply
  static constexpr int kQueryChunkBytes = kRows * kLineBytes;
  static constexpr int kQueryBytes = kQueryChunks * kQueryChunkBytes;
  static constexpr int kWeightBytes = kRows * kLineBytes;  // of a block

  // Where things lie.
  static constexpr int kQueryOffset = kSlots * kSlotBytes;
  static constexpr int kWeightOffset = kQueryOffset + kQueryBytes;
  static constexpr int kControlOffset = kWeightOffset + 2 * kWeightBytes;
  static constexpr size_t kSharedBytes = kControlOffset + sizeof(ControlOf<kRows, kScoreGroups, kSlots>);
  static_assert(kSharedBytes <= kSharedLimit);
};

// A block by its number in the part, which counts through all items: the slot of its `part`-th half, and the parity of
// that slot's barriers.
template <class Shape>
struct Place {
  uint32_t slot, parity;

  __device__ __forceinline__ Place(uint32_t block, uint32_t part) {
    const uint32_t number = block * Shape::kBlockSlots + part;
    slot = number % Shape::kSlots;
    parity = number / Shape::kSlots % 2;
  }
};

}  // namespace mla::sm90::fp8::wide
