// The requests of a ragged batch, as positions inside the arrays, whatever the lengths on the device say.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"
#include "kernels/params.h"

namespace mla {

// So that sums and differences of positions fit 32 bits.
constexpr int32_t kMostTokens = 1 << 29;

MLA_HOST_DEVICE MLA_FORCE_INLINE int32_t clamp(int32_t x, int32_t low, int32_t high) {
  return x < low ? low : x > high ? high : x;
}

// Tiles that a head may have: besides those that fill whole ones, a short one for each request, and for the queries
// that none owns.
template <int kTileQueries>
MLA_HOST_DEVICE inline int64_t most_head_tiles(const PrefillParams& p) {
  return int64_t{p.tokens} / kTileQueries + p.batch + 2;
}

// Queries and keys of one request.
struct Request {
  int32_t q_begin, q_end, kv_begin, kv_end;
  int32_t diagonal;  // causal: the query at position t sees keys before diagonal + t
  int32_t tiles;
};

// Queries in front of all requests and behind them make two requests more, 0 and batch + 1, which have no keys.
template <int kTileQueries>
MLA_HOST_DEVICE MLA_FORCE_INLINE Request read_request(const PrefillParams& p, int32_t index) {
  const bool real = index > 0 && index <= p.batch;
  const int32_t q_begin = index == 0 ? 0 : p.cu_q_lens[index - 1];
  const int32_t q_end = index <= p.batch ? p.cu_q_lens[index] : p.tokens;
  const int32_t kv_begin = real ? p.cu_kv_lens[index - 1] : 0, kv_end = real ? p.cu_kv_lens[index] : 0;
  Request r;
  r.q_begin = clamp(q_begin, 0, p.tokens);
  r.q_end = clamp(q_end, r.q_begin, p.tokens);
  r.kv_begin = clamp(kv_begin, 0, static_cast<int32_t>(p.stored));
  r.kv_end = clamp(kv_end, r.kv_begin, static_cast<int32_t>(p.stored));
  // The last query sees the last key. Lengths out of range may give anything here.
  r.diagonal = clamp(static_cast<int32_t>(static_cast<uint32_t>(kv_end) - static_cast<uint32_t>(q_end) + 1),
                     -kMostTokens, kMostTokens);
  r.tiles = (r.q_end - r.q_begin + kTileQueries - 1) / kTileQueries;
  return r;
}

}  // namespace mla
