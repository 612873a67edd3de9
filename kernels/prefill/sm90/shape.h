// The Hopper prefill kernel's geometry: its warps, and where things lie in shared memory. docs/hopper_prefill.md
// explains both.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "kernels/params.h"
#include "kernels/prefill/request.cuh"

namespace mla::sm90_prefill {

constexpr int kGroupWarps = 4;  // a warpgroup
constexpr int kGroupThreads = 32 * kGroupWarps;

// Two warpgroups attend, each with 64 of a tile's queries. The third one's warps bring keys and values, bring queries,
// and clear values that a weight of 0 would not silence.
constexpr int kGroups = 2;
constexpr int kAttendWarps = kGroups * kGroupWarps;
constexpr int kKeyWarp = kAttendWarps;
constexpr int kQueryWarp = kKeyWarp + 1;
constexpr int kClearWarp = kKeyWarp + 2;
constexpr int kClearWarps = 2;
constexpr int kThreads = 32 * (kAttendWarps + kGroupWarps);

// Registers a thread: at the launch, and then by role.
constexpr int kLaunchRegisters = 168;
constexpr int kAttendRegisters = 240;
constexpr int kLoadRegisters = 24;
static_assert(kGroups * kAttendRegisters + kLoadRegisters <= (kGroups + 1) * kLaunchRegisters);

constexpr int kGroupQueries = 64;
constexpr int kTileQueries = kGroups * kGroupQueries;
constexpr int kBlockKeys = 128;  // keys of a step

constexpr int kChunkColumns = 64;  // arrays lie in chunks of so many columns
constexpr int kKeyChunks = kHeadDim / kChunkColumns;
constexpr int kNopeChunks = kNope / kChunkColumns;
constexpr int kRopeChunks = kRope / kChunkColumns;
constexpr int kValueChunks = kNope / kChunkColumns;

constexpr int kMostStages = 4;  // of Format::kStages
constexpr int kTiles = 4;       // that the loading warps may be ahead of the attending ones, themselves included

constexpr int kStartBarrier = 1;  // named barrier of all threads, besides __syncthreads' 0
constexpr int kTurnBarriers = 2;  // and one for each attending group

constexpr int32_t kNever = INT32_MAX;  // a position that no key has

// Tiles in which values are first multiplied as they are: those of a CTA's first rounds, each of which is a bit for
// every attending warp.
constexpr int kFastRounds = 2048;
constexpr int kRetryWords = kFastRounds / 32;
constexpr uint32_t kAllWarps = (1u << kAttendWarps) - 1;

// Queries of one request and head, and the keys that they see. Positions are those in the arrays. Its size is a power
// of two, since the warps with few registers have none left for a product.
struct alignas(64) Tile {
  int32_t rows;  // queries, at most kTileQueries; 0: there is no tile, and none will come
  int32_t first_query;
  int32_t head;
  int32_t kv_begin, kv_end;  // the request's keys
  int32_t blocks;            // of keys, from kv_begin on, that some query sees
  int32_t whole_blocks;      // the first of them are seen wholly by all queries
  int32_t diagonal;          // causal: the query at position t sees keys before diagonal + t
  int32_t round;             // of the schedule
  uint32_t careful;          // 0: values are multiplied as they are; else cleared before, and these warps write
};

// Where the query warp is in the schedule. It is kept here since that warp has few registers, and the search for a tile
// needs them.
struct Progress {
  uint32_t head_tiles;    // of one head
  uint32_t group_places;  // over which the tiles of a group of heads are dealt
  uint32_t round;         // the next
  uint32_t tiles;         // published
  bool retrying;          // all tiles came once
  uint32_t retried;       // then: the warps that did not write the next one
  uint32_t retry_end;     // and no round from this one on comes again
  int32_t most_blocks;    // that a tile may need
  // Tiles with as many blocks as the one found last: their ranks among a head's.
  int32_t level_blocks, level_begin, level_end;
};

// Small things in shared memory, behind the arrays.
struct alignas(64) Control {
  uint32_t key_words[kMostStages][4];    // of a block of keys: a bit for each that is not masked
  uint32_t value_words[kMostStages][4];  // the same, for as long as its values are there
  Tile tiles[kTiles];                    // in turn
  Progress progress;
  int32_t unusable[kTiles][kClearWarps];        // position of the first cleared value that was not finite, or kNever
  uint32_t retries[kAttendWarps][kRetryWords];  // a bit for each round whose tile the warp did not write

  // mbarriers
  uint64_t tile_full[kTiles], tile_empty[kTiles];
  uint64_t query_full[kGroups], query_empty[kGroups];
  uint64_t key_full[kMostStages], key_empty[kMostStages];
  uint64_t value_full[kMostStages], value_empty[kMostStages];
  uint64_t value_raw[kMostStages];  // there, and to be cleared
};

// Copy engine's view of the arrays, [column in chunk, token, chunk, head], the innermost axis first. Keys come as their
// parts. Rope keys that all heads share have an axis of one head.
struct TensorMaps {
  CUtensorMap queries, nope, rope, values;
};

// How tiles are dealt to CTAs; schedule.cuh has the rule.
struct Schedule {
  int32_t group_heads;  // whose tiles run side by side, so that L2 holds their keys and values
  int32_t fast_rounds;  // at most kFastRounds; tiles of later rounds are careful ones
};

// A position in a ring of slots, and the parity of the barriers of its current round.
template <int kSlots>
struct Ring {
  static constexpr bool kPowerOfTwo = (kSlots & (kSlots - 1)) == 0;
  uint32_t count = 0;  // steps, modulo two rounds where a round is no power of two

  __device__ __forceinline__ int slot() const {
    return static_cast<int>(kPowerOfTwo ? count % kSlots : count < kSlots ? count : count - kSlots);
  }
  __device__ __forceinline__ uint32_t parity() const { return kPowerOfTwo ? count / kSlots % 2 : count >= kSlots; }
  __device__ __forceinline__ void advance() { count = kPowerOfTwo || count + 1 < 2 * kSlots ? count + 1 : 0; }
  __device__ __forceinline__ void advance(uint32_t steps) {
    count = kPowerOfTwo ? count + steps : (count + steps) % (2 * kSlots);
  }
};

// An mbarrier of Control, of which `control` is the shared address: array by its offset, and number in it.
__device__ __forceinline__ uint32_t barrier_at(uint32_t control, size_t array, int index) {
  return control + static_cast<uint32_t>(array) + index * 8;
}

// The first key that the query at this position does not see.
__device__ __forceinline__ int32_t visible_end(const Tile& tile, bool causal, int32_t query) {
  return causal ? clamp(tile.diagonal + query, tile.kv_begin, tile.kv_end) : tile.kv_end;
}

}  // namespace mla::sm90_prefill
