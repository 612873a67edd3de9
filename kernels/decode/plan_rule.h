// The rule of the work split, in closed form for one tile at a time, so that planners on every device agree bit for
// bit.
//
// All tiles (request, row tile) are laid on one line, each as long as its cost: overhead_blocks, then one unit for
// each block of keys. The line is cut into `parts` pieces of equal length; a tile is split where a cut falls into it.
// Equal cost for every part is what FlashMLA's scheduler aims at too; there one thread walks the batch, here every
// tile finds its cuts from the prefix sum of the costs alone.
#pragma once

#include <cstdint>

#include "kernels/params.h"

#if defined(__CUDACC__) || defined(__HIP__)
#define MLA_HOST_DEVICE __host__ __device__
#else
#define MLA_HOST_DEVICE
#endif

namespace mla {

// batch_invariant: a tile is split by its own length alone, into at most this many pieces ...
constexpr int32_t kInvariantMaxSplits = 16;
// ... of at least this many blocks.
constexpr int32_t kInvariantMinBlocks = 32;

struct TileCost {
  int32_t blocks;  // of keys; 0: nothing to do
  int32_t cost;    // its length on the line
};

struct TileCut {
  int32_t count;  // pieces; 0 for a tile without keys
  int32_t part;   // of the first piece (unless batch_invariant)
  int32_t chunk;  // blocks a piece (batch_invariant alone)
};

MLA_HOST_DEVICE inline int32_t ceil_div(int32_t a, int32_t b) { return a / b + (a % b != 0); }
MLA_HOST_DEVICE inline int32_t min_of(int32_t a, int32_t b) { return a < b ? a : b; }
MLA_HOST_DEVICE inline int32_t max_of(int32_t a, int32_t b) { return a > b ? a : b; }

// Query tokens of request b, never negative and never more than max_q_len, whatever the array holds.
MLA_HOST_DEVICE inline int32_t query_count(const int32_t* cu_q_lens, int32_t b, int32_t max_q_len) {
  if (cu_q_lens == nullptr) return max_q_len;
  const int64_t count = int64_t{cu_q_lens[b + 1]} - cu_q_lens[b];
  return count < 0 ? 0 : count > max_q_len ? max_q_len : static_cast<int32_t>(count);
}

MLA_HOST_DEVICE inline TileCost tile_cost(const PlanDecodeParams& p, int32_t tile) {
  const int32_t request = tile / p.plan.row_tiles;
  const int64_t first_row = int64_t{tile % p.plan.row_tiles} * p.plan.tile_rows;
  const int64_t rows = int64_t{query_count(p.cu_q_lens, request, p.max_q_len)} * p.heads;
  const int32_t kv_len = p.kv_lens[request];
  if (kv_len <= 0 || first_row >= rows) return {0, 0};
  const int32_t blocks = ceil_div(kv_len, kBlockTokens);
  return {blocks, blocks + p.overhead_blocks};
}

// Length of a part on the line, from the sum of all costs.
MLA_HOST_DEVICE inline int64_t part_length(const PlanDecodeParams& p, int64_t total_cost) {
  const int64_t even = (total_cost + p.plan.parts - 1) / p.plan.parts;
  return even < p.min_part_blocks ? p.min_part_blocks : even < 1 ? 1 : even;
}

// `start` is the sum of the costs of all tiles before this one.
MLA_HOST_DEVICE inline TileCut cut_tile(const PlanDecodeParams& p, TileCost tile, int64_t start, int64_t length) {
  if (tile.blocks == 0) return {0, 0, 0};
  if (p.batch_invariant) {
    const int32_t wanted = min_of(kInvariantMaxSplits, ceil_div(tile.blocks, kInvariantMinBlocks));
    const int32_t chunk = ceil_div(tile.blocks, wanted);
    return {ceil_div(tile.blocks, chunk), 0, chunk};
  }
  const int64_t first_block = start + p.overhead_blocks;
  const int64_t first = first_block / length;
  const int64_t last = (first_block + tile.blocks - 1) / length;
  return {static_cast<int32_t>(last - first + 1), static_cast<int32_t>(first), 0};
}

struct Piece {
  int32_t part;
  int32_t block_begin, block_end;
};

// Piece i of a tile that cut_tile cut into `cut.count`.
MLA_HOST_DEVICE inline Piece cut_piece(const PlanDecodeParams& p, TileCost tile, TileCut cut, int32_t i, int64_t start,
                                       int64_t length) {
  const int64_t first_block = start + p.overhead_blocks;
  if (p.batch_invariant) {
    const int32_t begin = i * cut.chunk;
    return {static_cast<int32_t>((first_block + begin) / length), begin, min_of(begin + cut.chunk, tile.blocks)};
  }
  const int32_t part = cut.part + i;
  const int64_t begin = part * length - first_block;
  const int64_t end = begin + length;
  return {part, begin < 0 ? 0 : static_cast<int32_t>(begin),
          end > tile.blocks ? tile.blocks : static_cast<int32_t>(end)};
}

// Bounds from shapes alone: what the arrays of a plan must hold. A cut splits one tile in two, so all split tiles
// together have at most 2 * (parts - 1) pieces.
inline int64_t max_items(int64_t tiles, int64_t parts, bool batch_invariant) {
  return batch_invariant ? tiles * kInvariantMaxSplits : tiles + parts;
}
inline int64_t max_partials(int64_t tiles, int64_t parts, bool batch_invariant) {
  return batch_invariant ? tiles * kInvariantMaxSplits : 2 * parts;
}

}  // namespace mla
