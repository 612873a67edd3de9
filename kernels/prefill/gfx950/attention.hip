// mla_prefill in e4m3fn on gfx950: the pieces of the plan, by as many workgroups as the plan counts with. Both products
// are the scaled ones of 8-bit elements, with scales of 1; weights become e4m3fn between them.
#include "kernels/prefill/gfx9/output.h"
#include "kernels/prefill/gfx950/blocks.h"

namespace mla::gfx9_prefill::fp8 {
namespace {

using Queries = Fragment[kKeySteps];

__device__ __forceinline__ F32x16 multiply(Fragment a, Fragment b, F32x16 sums) {
  constexpr int kE4M3 = 0;  // the format of an operand
  return __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(a, b, sums, kE4M3, kE4M3, 0, 0, 0, 0);
}

// `row`: of the tile, this lane's. Rows that do not exist are 0. `negated`: with their signs changed.
__device__ __forceinline__ void load_queries(const PrefillParams& p, const Tile& tile, int32_t row, bool negated,
                                             Queries& queries) {
  const bool exists = row < tile.rows;
  const int64_t query = int64_t{tile.first_query + (exists ? row : 0)} * p.heads + tile.head;
  const auto* source = static_cast<const unsigned char*>(p.q) + query * kHeadDim + lane_id() / 32 * 32;
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    const Fragment read = *reinterpret_cast<const Fragment*>(source + step * 64);
    queries[step] = exists ? read ^ (negated ? static_cast<int>(0x80808080) : 0) : Fragment{};
  }
}

__device__ __forceinline__ void score_block(LdsBytes block, const Queries& queries, Scores<kBlockKeys>& scores) {
#pragma unroll
  for (int tile = 0; tile < kBlockKeys / 32; ++tile) {
    scores[tile] = F32x16{};
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      scores[tile] = multiply(key_fragment(block, tile, step), queries[step], scores[tile]);
    }
  }
}

// The instruction writes half a register, and the other one's old bits do not matter: those of a weight cost no move.
__device__ __forceinline__ int pack_weights(float a, float b, float c, float d) {
  const int low = __builtin_amdgcn_cvt_pk_fp8_f32(a, b, bits_as<int>(a), false);
  return __builtin_amdgcn_cvt_pk_fp8_f32(c, d, low, true);
}

__device__ __forceinline__ void accumulate_block(LdsBytes block, const Scores<kBlockKeys>& scores, Rows& rows) {
#pragma unroll
  for (int step = 0; step < kBlockSteps; ++step) {
    Fragment weights;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const F32x16& four = scores[2 * step + i / 4];
      const int at = i % 4 * 4;
      weights[i] = pack_weights(four[at], four[at + 1], four[at + 2], four[at + 3]);
    }
#pragma unroll
    for (int tile = 0; tile < kValueTiles; ++tile) {
      rows.out[tile] = multiply(value_fragment(block, tile, step), weights, rows.out[tile]);
    }
  }
}

__device__ __forceinline__ float scale_or_one(const float* scale) { return scale != nullptr ? *scale : 1.0f; }

// A row of a piece, normalised, as fp32.
__device__ __forceinline__ void store_partial(const Scratch& scratch, int64_t index, const Ending& ending,
                                              const Rows& rows) {
  float* out = scratch.out + index * kNope + lane_id() / 32 * 4;
#pragma unroll
  for (int i = 0; i < kNope / 8; ++i) {
    *reinterpret_cast<F32x4*>(out + 8 * i) = four_columns(rows, i) * ending.factor;
  }
  if (lane_id() < 32) scratch.lse[index] = ending.lse;
}

__device__ __forceinline__ Tile tile_of(const Piece& piece, int32_t head) {
  return {uniform(piece.rows),     uniform(piece.first_query), head,
          uniform(piece.kv_begin), uniform(piece.kv_end),      uniform(piece.diagonal)};
}

__device__ __forceinline__ void attend_piece(const PrefillParams& p, const Scratch& scratch, const Piece& piece,
                                             int32_t head, LdsBytes memory) {
  const Tile tile = tile_of(piece, head);
  const int32_t begin = uniform(piece.first_block), end = uniform(piece.end_block), partial = uniform(piece.partial);
  // Keys that the tile's last row sees in the piece, that its first one does, and that this wave's rows do.
  const int32_t seen = visible_keys(tile, p.causal, tile.rows - 1), whole = visible_keys(tile, p.causal, 0);
  const int32_t keys = seen < end * kBlockKeys ? seen : end * kBlockKeys;
  const int32_t first_row = wave_id() * kWaveQueries, row = first_row + lane_id() % 32;
  const int32_t last_row = clamp(first_row + kWaveQueries - 1, 0, tile.rows - 1);
  const int32_t wave_keys = first_row < tile.rows ? visible_keys(tile, p.causal, last_row) : 0;
  const int32_t wave_whole = visible_keys(tile, p.causal, first_row);
  const int32_t visible = visible_keys(tile, p.causal, row);
  const float signed_scale = p.scale * scale_or_one(p.q_scale) * scale_or_one(p.k_scale);
  const float scale = exponent_scale(signed_scale);
  const bool key_mask = p.key_mask != nullptr;

  Blocks blocks(p, tile, keys, begin, memory);
  Queries queries;
  load_queries(p, tile, row, signed_scale < 0, queries);
  Rows rows;
  int32_t unusable = kNever;
#pragma unroll 1
  for (int32_t block = begin; block < end; ++block) {
    const int32_t first = block * kBlockKeys;
    const auto bits = read_key_bits<kBlockKeys>(p, tile.kv_begin + first);
    const LdsBytes at = blocks.take(block, key_mask || first + kBlockKeys > whole, bits, unusable);
    if (first >= wave_keys) continue;
    Scores<kBlockKeys> scores;
    score_block(at, queries, scores);
    if (key_mask || first + kBlockKeys > wave_whole) mask_scores<kBlockKeys>(visible - first, bits, scores);
    weigh_scores<kBlockKeys>(scale, kWeightShift, kWeightSlack, scores, rows);
    accumulate_block(at, scores, rows);
  }
  unusable = least_of_workgroup<kWaves>(unusable, memory);
  const bool exists = row<tile.rows, spoiled = visible> unusable;
  const Ending ending = end_row(rows, spoiled, scale_or_one(p.v_scale));
  if (partial < 0) {
    finish_row<BF16>(p, int64_t{tile.first_query + row} * p.heads + head, exists, ending, rows);
  } else {
    store_partial(scratch, (int64_t{partial} * p.heads + head) * kTileQueries + row, ending, rows);
  }
  lds_barrier();  // the next piece's blocks come where this one's values were compared
}

// Pieces of all heads, the costliest first, are dealt in rounds that run to and fro: who had the longest of one has the
// shortest of the next.
__device__ __forceinline__ void attend_pieces(const PrefillParams& p, LdsBytes memory) {
  const Scratch scratch(p, limits_of(p));
  const auto heads = static_cast<uint32_t>(p.heads);
  const auto work = static_cast<uint32_t>(uniform(scratch.plan->pieces)) * heads;
#pragma unroll 1
  for (uint32_t round = 0; round * kWorkgroups < work; ++round) {
    const uint32_t place = round * kWorkgroups + (round % 2 == 0 ? blockIdx.x : kWorkgroups - 1 - blockIdx.x);
    if (place >= work) continue;
    const uint32_t index = place / heads;
    const Piece& piece = scratch.pieces[index];
    if (uniform(piece.rows) == 0) continue;
    attend_piece(p, scratch, piece, static_cast<int32_t>(place - index * heads), memory);
  }
}

}  // namespace
}  // namespace mla::gfx9_prefill::fp8

MLA_KERNEL __launch_bounds__(512) MLA_WAVES_A_SIMD(2) mla_prefill_fp8(mla::PrefillParams p) {
  __shared__ __attribute__((aligned(128))) unsigned char memory[mla::gfx9_prefill::fp8::kLdsBytes];
  mla::gfx9_prefill::fp8::attend_pieces(p, mla::lds_address(memory));
}
