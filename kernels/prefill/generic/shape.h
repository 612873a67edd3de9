// The generic prefill kernel's geometry: how eight warps share a tile, and where things lie in shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/params.h"
#include "kernels/prefill/request.cuh"

namespace mla::generic_prefill {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpQueries = 16;  // rows of a product
constexpr int kTileQueries = kWarps * kWarpQueries;
constexpr int kBlockKeys = 64;  // keys of a step
constexpr int kStages = 2;      // one block is worked on while the other comes

// A token's line; chunk c of 16 bytes of line r lies at c ^ (r % 8), so that ldmatrix, which reads one chunk of eight
// neighbouring tokens, meets every bank once.
constexpr int kKeyLine = kHeadDim * 2;
constexpr int kValueLine = kNope * 2;
constexpr int kCopyLanes = 8;  // threads that bring a token's line

constexpr int kValuesAt = kBlockKeys * kKeyLine;
constexpr int kStageBytes = kValuesAt + kBlockKeys * kValueLine;

constexpr int32_t kNever = INT32_MAX;  // a key that no row sees

// Queries of one request and head, and the keys that they see.
struct Tile {
  int32_t rows;  // queries; 0: there is no tile
  int32_t first_query;
  int32_t head;
  int32_t kv_begin, kv_end;
  int32_t diagonal;  // as in Request
};

// Small things in shared memory, behind the stages.
struct Control {
  Tile tile;
  int32_t unusable;  // the first key of the request whose values were not finite and were cleared, or kNever
};

constexpr int kControlAt = kStages * kStageBytes;
constexpr size_t kSharedBytes = kControlAt + sizeof(Control);
static_assert(kSharedBytes <= 99 * 1024, "what the smallest of the GPUs from sm_80 on has");

// Keys of its request that the tile's row sees.
__device__ __forceinline__ int32_t visible_keys(const Tile& tile, bool causal, int32_t row) {
  const int32_t end = causal ? clamp(tile.diagonal + tile.first_query + row, tile.kv_begin, tile.kv_end) : tile.kv_end;
  return end - tile.kv_begin;
}

}  // namespace mla::generic_prefill
