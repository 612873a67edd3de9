// mla_prefill in bf16 and fp16: attention of up-projected queries and keys over a ragged batch.
//
// A workgroup has up to 128 queries (gfx942: 256) of one request and head, 32 a wave. Scores are computed transposed,
// S^T = K Q^T, and so is the output, O^T = V^T P^T: then weights are an operand of the second product in the very
// registers that the first one left them in, and a query's softmax is a lane's own business, but for one exchange with
// the lane that has the query's other keys.
#pragma once

#include "kernels/prefill/gfx9/output.h"
#if defined(__gfx950__)
#include "kernels/prefill/gfx9/blocks_gfx950.h"
#else
#include "kernels/prefill/gfx9/blocks_gfx942.h"
#endif

namespace mla::gfx9_prefill {

using Architecture = std::conditional_t<kGfx950, Gfx950, Gfx942>;
constexpr int kThreads = Architecture::kWaves * kWave;
constexpr int kLdsBytes = Architecture::kStages * kBlockBytes;

using Queries = Fragment[kKeySteps];

// `row`: of the tile, this lane's. Rows that do not exist are 0. `negated`: with their signs changed.
__device__ __forceinline__ void load_queries(const PrefillParams& p, const Tile& tile, int32_t row, bool negated,
                                             Queries& queries) {
  const bool exists = row < tile.rows;
  const int64_t query = int64_t{tile.first_query + (exists ? row : 0)} * p.heads + tile.head;
  const auto* source = static_cast<const unsigned char*>(p.q) + query * kHeadDim * 2 + lane_id() / 32 * 16;
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    const Fragment read = *reinterpret_cast<const Fragment*>(source + step * 32);
    queries[step] = exists ? read ^ (negated ? 0x80008000 : 0) : Fragment{};
  }
}

template <class Element>
__device__ __forceinline__ void score_block(LdsBytes block, const Queries& queries, Scores<kBlockKeys>& scores) {
#pragma unroll
  for (int tile = 0; tile < kScoreTiles; ++tile) {
    scores[tile] = F32x16{};
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      scores[tile] = multiply<Element>(key_fragment(block, tile, step), queries[step], scores[tile]);
    }
  }
}

template <class Element>
__device__ __forceinline__ void accumulate_block(LdsBytes block, const Scores<kBlockKeys>& scores, Rows& rows) {
#pragma unroll
  for (int step = 0; step < kBlockSteps; ++step) {
    const F32x16& weights = scores[step / 2];
    const int at = step % 2 * 8;
    Fragment packed;
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = pack<Element>(F32x2{weights[at + 2 * i], weights[at + 2 * i + 1]});
#pragma unroll
    for (int tile = 0; tile < kValueTiles; ++tile) {
      rows.out[tile] = multiply<Element>(value_fragment(block, tile, step), packed, rows.out[tile]);
    }
  }
}

template <class Element>
__device__ __forceinline__ void attend_tile(const PrefillParams& p, const Tile& tile, LdsBytes memory) {
  // Keys that the tile's last row sees, that its first one does, and that this wave's rows do.
  const int32_t keys = visible_keys(tile, p.causal, tile.rows - 1), whole = visible_keys(tile, p.causal, 0);
  const int32_t first_row = wave_id() * kWaveQueries, row = first_row + lane_id() % 32;
  const int32_t last_row = clamp(first_row + kWaveQueries - 1, 0, tile.rows - 1);
  const int32_t wave_keys = first_row < tile.rows ? visible_keys(tile, p.causal, last_row) : 0;
  const int32_t wave_whole = visible_keys(tile, p.causal, first_row);
  const int32_t visible = visible_keys(tile, p.causal, row);
  const float scale = exponent_scale(p.scale);
  const bool key_mask = p.key_mask != nullptr;

  Blocks<Architecture, Element> blocks(p, tile, keys, memory);
  Queries queries;
  load_queries(p, tile, row, p.scale < 0, queries);
  Rows rows;
  int32_t unusable = kNever;
#pragma unroll 1
  for (int32_t first = 0; first < keys; first += kBlockKeys) {
    const auto bits = read_key_bits<kBlockKeys>(p, tile.kv_begin + first);
    const LdsBytes block = blocks.take(first / kBlockKeys, key_mask || first + kBlockKeys > whole, bits, unusable);
    if (first >= wave_keys) continue;
    Scores<kBlockKeys> scores;
    score_block<Element>(block, queries, scores);
    if (key_mask || first + kBlockKeys > wave_whole) mask_scores<kBlockKeys>(visible - first, bits, scores);
    weigh_scores<kBlockKeys>(scale, 0, kSlack, scores, rows);
    accumulate_block<Element>(block, scores, rows);
  }
  unusable = least_of_workgroup<Architecture::kWaves>(unusable, memory);
  const int64_t index = int64_t{tile.first_query + row} * p.heads + tile.head;
  const bool exists = row<tile.rows, spoiled = visible> unusable;
  finish_row<Element>(p, index, exists, end_row(rows, spoiled, 1), rows);
}

// Heads run side by side, so that those of a number modulo 8 share a die and its L2, where their number allows.
template <class Element>
__device__ __forceinline__ void prefill(const PrefillParams& p, LdsBytes memory) {
  const auto heads = static_cast<uint32_t>(p.heads), index = blockIdx.x / heads;
  Tile tile = find_tile<kTileQueries<Architecture>>(p, static_cast<int32_t>(index));
  tile.head = static_cast<int32_t>(blockIdx.x - index * heads);
  if (tile.rows > 0) attend_tile<Element>(p, tile, memory);
}

}  // namespace mla::gfx9_prefill
