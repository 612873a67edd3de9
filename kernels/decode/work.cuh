// What one item of a plan means for a CTA, clamped so that no value of a plan, a length or a page table leads outside
// the arrays.
#pragma once

#include "kernels/decode/plan_rule.h"
#include "kernels/decode/softmax.h"
#include "kernels/params.h"

namespace mla {

struct Tile {
  int64_t first_row;    // of [T * H]: the tile's rows follow one another there
  int32_t rows;         // that exist, at most tile_rows
  int32_t request_row;  // the first row's number in its request, query * H + head
  int32_t request;
  int32_t kv_begin, kv_end;
  int32_t partial;   // -1: written directly
  int64_t diagonal;  // keys that query 0 sees, before clamping; query i sees i more
};

// An item is read in two loads, and so is all of it that is used.
struct alignas(16) HalfItem {
  int32_t at[4];
};

__device__ __forceinline__ WorkItem read_item(const DecodeParams& p, int32_t index) {
  const auto* halves = reinterpret_cast<const HalfItem*>(p.plan.items + index);
  const HalfItem first = halves[0], second = halves[1];
  return {first.at[0], first.at[1], first.at[2], first.at[3], second.at[0], {}};
}

// False: nothing to do.
__device__ __forceinline__ bool find_tile(const DecodeParams& p, const WorkItem& item, Tile& tile) {
  const int32_t request = item.request, row_tile = item.row_tile;
  if (request < 0 || request >= p.batch || row_tile < 0 || row_tile >= p.plan.row_tiles) return false;
  if (item.partial >= p.plan.max_partials) return false;

  int64_t first_query = int64_t{request} * p.max_q_len;
  int64_t queries = p.max_q_len;
  if (p.cu_q_lens != nullptr) {
    first_query = p.cu_q_lens[request];
    queries = p.cu_q_lens[request + 1] - first_query;
  }
  const int64_t request_row = int64_t{row_tile} * p.plan.tile_rows;
  int64_t rows = (queries < p.max_q_len ? queries : p.max_q_len) * p.heads - request_row;
  const int64_t rows_left = (p.tokens - first_query) * p.heads - request_row;
  if (rows > rows_left) rows = rows_left;
  if (rows > p.plan.tile_rows) rows = p.plan.tile_rows;
  if (first_query < 0 || rows <= 0) return false;

  const int32_t kv_len = max_of(p.kv_lens[request], 0);
  const int64_t table_tokens = int64_t{p.max_pages} * p.page_size;
  tile.first_row = first_query * p.heads + request_row;
  tile.rows = static_cast<int32_t>(rows);
  tile.request_row = static_cast<int32_t>(request_row);
  tile.request = request;
  tile.kv_begin = max_of(item.kv_begin, 0) / kBlockTokens * kBlockTokens;
  tile.kv_end = max_of(min_of(item.kv_end, kv_len), 0);
  if (tile.kv_end > table_tokens) tile.kv_end = static_cast<int32_t>(table_tokens);
  tile.partial = max_of(item.partial, -1);
  tile.diagonal = kv_len - queries + 1;
  return true;
}

__device__ __forceinline__ bool find_tile(const DecodeParams& p, int32_t item_index, Tile& tile) {
  return find_tile(p, read_item(p, item_index), tile);
}

// First key that row `row` of the tile does not see.
__device__ __forceinline__ int32_t visible_end(const DecodeParams& p, const Tile& tile, int32_t row) {
  if (!p.causal) return tile.kv_end;
  const int64_t end = tile.diagonal + (tile.request_row + row) / p.heads;
  return end < 0 ? 0 : end < tile.kv_end ? static_cast<int32_t>(end) : tile.kv_end;
}

// The slot of a token in two steps, so that other work hides the latency of the page table.
struct SlotLookup {
  int32_t page;    // -1: masked
  int32_t offset;  // in it

  __device__ __forceinline__ int32_t slot(const DecodeParams& p) const {
    return page < 0 || page >= p.pages ? -1 : page * p.page_size + offset;
  }
};

__device__ __forceinline__ SlotLookup look_up(const DecodeParams& p, const Tile& tile, int64_t token) {
  if (token >= tile.kv_end) return {-1, 0};
  const auto index = static_cast<uint32_t>(token), page_size = static_cast<uint32_t>(p.page_size);
  const uint32_t page_index = index / page_size;
  return {p.page_table[int64_t{tile.request} * p.max_pages + page_index], static_cast<int32_t>(index % page_size)};
}

// The first row of a tile's results among the partials. `first_row`: the tile's, of [T * H].
__device__ __forceinline__ int64_t partial_row(const DecodeParams&, int32_t partial, int64_t /*first_row*/,
                                               int32_t tile_rows) {
  return int64_t{partial} * tile_rows;
}

// Where an operation has a sink, `inverse`, of a row's sum of weights, takes it in. `reference`: of the weights, in
// base 2.
__device__ __forceinline__ void add_sink(const DecodeParams&, const Tile&, int32_t /*row*/, float /*sum*/,
                                         float /*reference*/, float& /*inverse*/) {}

// Whoever reads keys that have arrived calls this before the first product: copies of the copy engine need nothing.
__device__ __forceinline__ void order_arrived_keys(const DecodeParams&) {}

// By how much, in base 2, a row's maximum outgrows the reference of its exponents before that follows. At once: then
// the row's largest weight is 1, which is exact in any format.
template <class Params>
inline constexpr float kReferenceSlack = 0;

// Which of the pages that share a block has its token `token`.
__device__ __forceinline__ int page_in_block(const DecodeParams& p, int token) {
  return p.page_size < kBlockTokens ? token / p.page_size : 0;
}

}  // namespace mla
