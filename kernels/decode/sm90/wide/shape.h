// The geometry of the Hopper decode kernel for wide tiles, of 64 rows: its warps, and where things lie in shared
// memory. docs/hopper.md explains both.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/decode/sm90/shape.h"

namespace mla::sm90::wide {

// Warps by role, in whole warpgroups: two that attend, one that loads.
constexpr int kGroups = 2;
constexpr int kAttendWarps = kGroups * kGroupWarps;
constexpr int kAttendThreads = 32 * kAttendWarps;
constexpr int kKeyWarp = kAttendWarps;
constexpr int kQueryWarp = kKeyWarp + 1;
constexpr int kThreads = kAttendThreads + kGroupThreads;

// Registers a thread: of all at the launch, and then by role. One that attends holds 128 sums of the output.
constexpr int kLaunchRegisters = 168;
constexpr int kAttendRegisters = 232;
constexpr int kLoadRegisters = 40;
static_assert(kGroups * kAttendRegisters + kLoadRegisters <= kThreads / kGroupThreads * kLaunchRegisters,
              "a CTA cannot have more than it was launched with");

// A slice is eight tokens with all of their columns, nine chunks of 64: what one copy brings. Two slices are a slot,
// the 16 tokens that one product of the output takes, so that a slot is free as soon as that product is done. Shared
// memory holds two blocks.
constexpr int kSliceTokens = 8;
constexpr int kSliceChunkBytes = kSliceTokens * kLineBytes;
constexpr int kSliceBytes = kChunks * kSliceChunkBytes;
constexpr int kSlotSlices = 2;
constexpr int kSlotTokens = kSlotSlices * kSliceTokens;
constexpr int kSlotBytes = kSlotSlices * kSliceBytes;
constexpr int kBlockSlots = kBlockTokens / kSlotTokens;
constexpr int kBlockSlices = kBlockTokens / kSliceTokens;
constexpr int kBlockBytes = kBlockSlots * kSlotBytes;
constexpr int kBlocks = 2;
constexpr int kSlots = kBlocks * kBlockSlots;
constexpr uint32_t kAllSlices = (1u << kBlockSlices) - 1;

// As the loader of the queries knows a tile.
struct Shape {
  static constexpr int kRows = 64;
  static constexpr int kQueryChunkBytes = kRows * kLineBytes;
  static constexpr int kQueryBytes = kChunks * kQueryChunkBytes;
};
constexpr int kRows = Shape::kRows;

// What the warps of both groups that have the same rows tell each other in a round, of two blocks.
struct Round {
  float references[kGroups][kRows];      // that each group's block asks for
  uint32_t moved[kGroups][kGroupWarps];  // whether one of a warp's rows has another than before
};

// Small things in shared memory, behind the blocks and the queries.
struct alignas(16) Control {
  Round rounds[2];  // in turn
  float sums[kGroups][kRows];
  Queries<Shape> queries[2];       // of items in turn
  uint32_t valid_slices[kBlocks];  // a bit for each slice whose page is in the cache

  // mbarriers
  uint64_t full[kSlots];
  uint64_t empty[kSlots];
  uint64_t query_full, query_empty;
};

constexpr size_t kSharedBytes = kBlocks * kBlockBytes + Shape::kQueryBytes + sizeof(Control);
static_assert(kSharedBytes <= 227 * 1024);

// A block by its number in the part, which counts through all items: where it lies, and the parity of its barriers.
struct Place {
  uint32_t buffer, parity;

  __device__ __forceinline__ explicit Place(uint32_t number) : buffer(number % kBlocks), parity(number / kBlocks % 2) {}

  __device__ __forceinline__ uint32_t slot(int i) const { return buffer * kBlockSlots + i; }
};

}  // namespace mla::sm90::wide
