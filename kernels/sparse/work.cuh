// One piece of mla_sparse_decode's work, as the kernels of dense decode know it: the request is the query token, and
// keys are counted along its indices. No value of an index or a length leads outside the arrays.
#pragma once

#include "kernels/decode/softmax.h"
#include "kernels/decode/work.cuh"
#include "kernels/sparse/split.h"

namespace mla {

// A query token, a tile of its heads and a piece of its indices. Tiles that read the same tokens are neighbours.
struct SparseWork {
  int32_t token, tile, split;

  __device__ __forceinline__ static int32_t tiles(const SparseDecodeParams& p) {
    return ceil_div(p.heads, p.tile_rows);
  }

  __device__ __forceinline__ SparseWork(const SparseDecodeParams& p, int32_t index) {
    tile = index % tiles(p);
    split = index / tiles(p) % p.splits;
    token = index / tiles(p) / p.splits;
  }
};

// kv_begin and kv_end: of the indices; none of a layer out of range.
__device__ __forceinline__ Tile tile_of(const SparseDecodeParams& p, const SparseWork& work) {
  Tile tile{};
  const Piece piece = piece_of(p.topk, p.splits, work.split);
  tile.request = work.token;
  tile.request_row = work.tile * p.tile_rows;
  tile.first_row = int64_t{work.token} * p.heads + tile.request_row;
  tile.rows = min_of(p.tile_rows, p.heads - tile.request_row);
  tile.partial = p.splits == 1 ? -1 : work.split;
  tile.kv_begin = piece.begin;
  tile.kv_end = piece.end;
  if (p.topk_lens != nullptr) tile.kv_end = max_of(min_of(piece.end, p.topk_lens[work.token]), piece.begin);
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  if (layer < 0 || layer >= p.layers) tile.kv_end = tile.kv_begin;
  return tile;
}

// The i-th index as it is written, or -1 behind the last one. To ask for indices early: a comparison of what it says
// would wait for it.
__device__ __forceinline__ int32_t index_at(const SparseDecodeParams& p, const Tile& tile, int64_t i) {
  return i < tile.kv_end ? p.indices[int64_t{tile.request} * p.topk + i] : -1;
}

// The slot that an index names, or -1.
__device__ __forceinline__ int32_t slot_of(const SparseDecodeParams& p, int32_t index) {
  return index < 0 || index >= p.slots ? -1 : index;
}

__device__ __forceinline__ int32_t slot_at(const SparseDecodeParams& p, const Tile& tile, int64_t i) {
  return slot_of(p, index_at(p, tile, i));
}

// Where the layer's tokens begin; of a layer out of range no token is read.
__device__ __forceinline__ const unsigned char* layer_of(const SparseDecodeParams& p, int64_t token_bytes) {
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  return static_cast<const unsigned char*>(p.cache) +
         (layer < 0 || layer >= p.layers ? 0 : layer * p.slots * token_bytes);
}

// An item as the warps of the Hopper kernels that attend know it, by a whole warp: with keys [0, as many as its indices
// name).
__device__ __forceinline__ bool find_tile(const SparseDecodeParams& p, int32_t item, Tile& tile) {
  tile = tile_of(p, SparseWork(p, item));
  // Many a lane at once: one after the other, each would take a latency of memory.
  constexpr int kBatch = 16;
  const int32_t* const indices = p.indices + int64_t{tile.request} * p.topk;
  int32_t count = 0, i = tile.kv_begin + static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll 1
  for (; i + 32 * (kBatch - 1) < tile.kv_end; i += 32 * kBatch) {
    int32_t batch[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) batch[j] = indices[i + 32 * j];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) count += slot_of(p, batch[j]) >= 0;
  }
#pragma unroll 1
  for (; i < tile.kv_end; i += 32) count += slot_of(p, indices[i]) >= 0;
  tile.kv_begin = 0;
  tile.kv_end = __reduce_add_sync(0xFFFFFFFF, count);
  return true;
}

// What the Hopper kernels ask of an operation, as for DecodeParams in kernels/decode/work.cuh.

__device__ __forceinline__ int64_t partial_row(const SparseDecodeParams& p, int32_t partial, int64_t first_row,
                                               int32_t) {
  return int64_t{partial} * p.tokens * p.heads + first_row;
}

__device__ __forceinline__ void add_sink(const SparseDecodeParams& p, const Tile& tile, int32_t row, float sum,
                                         float reference, float& inverse) {
  if (p.sink == nullptr) return;
  inverse *= sum / (sum + exp2f(p.sink[tile.request_row + row] * kLog2E - reference));
}

__device__ __forceinline__ int32_t visible_end(const SparseDecodeParams&, const Tile& tile, int32_t) {
  return tile.kv_end;
}

template <>
inline constexpr float kReferenceSlack<SparseDecodeParams> = kSlack;

__device__ __forceinline__ int page_in_block(const SparseDecodeParams&, int) { return 0; }

}  // namespace mla
