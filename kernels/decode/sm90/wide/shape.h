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
constexpr int kKeyWarp = kAttendWarps;  // and the two behind it
constexpr int kKeyWarps = 3;
constexpr int kQueryWarp = kKeyWarp + kKeyWarps;
constexpr int kThreads = kAttendThreads + kGroupThreads;

// Registers a thread: of all at the launch, and then by role. One that attends holds 128 sums of the output.
constexpr int kLaunchRegisters = 168;
constexpr int kAttendRegisters = 232;
constexpr int kLoadRegisters = 40;
static_assert(kGroups * kAttendRegisters + kLoadRegisters <= kThreads / kGroupThreads * kLaunchRegisters,
              "a CTA cannot have more than it was launched with");

// Named barriers, besides kStartBarrier, kGroupBarrier and kItemBarrier: the weights that a warp of group 0, 1 has for
// the one of the other group with the same rows. From here on eight of them, first those of group 0.
constexpr int kWeightsBarrier = 8;

// Shared memory holds two blocks. Each chunk of a block, of 64 columns, is a slot of its own, so that its place is free
// as soon as the output's product with these columns is done.
constexpr int kBlocks = 2;
constexpr int kBlockBytes = kChunks * kChunkBytes;
constexpr int kSlots = kBlocks * kChunks;

// The output's columns are shared between the groups by halves, which two products bring, of two chunks each.
constexpr int kGroupChunks = kLatentChunks / kGroups;
constexpr int kProductChunks = 2;
constexpr int kGroupProducts = kGroupChunks / kProductChunks;
constexpr int kRopeChunk = kLatentChunks;

// A block's chunks in the order in which they are brought and multiplied with the queries: that in which both groups
// give back those of the block before.
__host__ __device__ constexpr uint32_t chunk_in_order(uint32_t i) {
  if (i == 0) return kRopeChunk;
  const uint32_t product = (i - 1) / kProductChunks;  // in turn the groups' first, second, ..
  return product % kGroups * kGroupChunks + product / kGroups * kProductChunks + (i - 1) % kProductChunks;
}

// The tokens that one product of the output takes.
constexpr int kStepTokens = 16;
constexpr int kSteps = kBlockTokens / kStepTokens;

// What the masks know of a block: whether the page of eight neighbouring tokens, a slice, is in the cache.
constexpr int kSliceTokens = 8;
constexpr int kBlockSlices = kBlockTokens / kSliceTokens;
constexpr uint32_t kAllSlices = (1u << kBlockSlices) - 1;

// As the loader of the queries knows a tile.
struct Shape {
  static constexpr int kRows = 64;
  static constexpr int kQueryChunkBytes = kRows * kLineBytes;
  static constexpr int kQueryBytes = kChunks * kQueryChunkBytes;
};
constexpr int kRows = Shape::kRows;

// Small things in shared memory, behind the blocks and the queries.
struct alignas(16) Control {
  // Of one block: what a thread of one group gives to the thread of the other with the same rows and tokens, in the
  // order of registers. It replaces what it has read itself, the block before's.
  uint4 weights[kSteps][kGroupThreads];
  float references[kRows];         // of the exponents, in base 2, as the latest block left them; -inf: no key seen yet
  float sums[kGroups][kRows];      // of the weights
  Queries<Shape> queries[2];       // of items in turn
  uint32_t valid_slices[kBlocks];  // a bit for each slice whose page is in the cache

  // mbarriers
  uint64_t full[kSlots];
  uint64_t empty[kSlots];
  uint64_t query_full, query_empty;
  uint64_t references_full[kGroups][kGroupWarps];  // by the group whose block they belong to, a warp for the other's
};

constexpr size_t kSharedBytes = kBlocks * kBlockBytes + Shape::kQueryBytes + sizeof(Control);
static_assert(kSharedBytes <= 227 * 1024);

// A block by its number in the part, which counts through all items: where it lies, and the parity of its barriers.
struct Place {
  uint32_t buffer, parity;

  __device__ __forceinline__ explicit Place(uint32_t number) : buffer(number % kBlocks), parity(number / kBlocks % 2) {}

  __device__ __forceinline__ uint32_t slot(int chunk) const { return buffer * kChunks + chunk; }
};

}  // namespace mla::sm90::wide
