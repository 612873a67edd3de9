// The geometry of 8-bit prefill on gfx950, and its scratch: the plan and the partial results, sized by shapes alone.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"
#include "kernels/params.h"
#include "kernels/prefill/gfx9/shape.h"

namespace mla::gfx9_prefill::fp8 {

constexpr int kWaves = 8;
constexpr int kThreads = kWaves * 64;
constexpr int kTileQueries = kWaves * kWaveQueries;
constexpr int kBlockKeys = 128;

// Arrays lie in LDS in panels of 64 columns: a line of 64 bytes for each key.
constexpr int kPanelLine = 64;
constexpr int kPanelBytes = kBlockKeys * kPanelLine;
constexpr int kKeyPanels = kHeadDim / kPanelLine;
constexpr int kValuePanels = kNope / kPanelLine;
constexpr int kKeyBytes = kKeyPanels * kPanelBytes;
constexpr int kBlockBytes = kKeyBytes + kValuePanels * kPanelBytes;  // 40 KB
constexpr int kStages = 2;
constexpr int kLdsBytes = kStages * kBlockBytes;

// Weights are 2^6 where a score is the reference's, up to 2^8 until that follows: below e4m3's 448, and those above
// 2^-12 of the largest are normal numbers.
constexpr float kWeightShift = 6;
constexpr float kWeightSlack = 2;

// Workgroups that share the work, one for each compute unit of a whole MI355X. A constant, so that scratch has one size
// wherever a program is compiled.
constexpr int32_t kWorkgroups = 256;
// Rows that a workgroup of the reduction takes.
constexpr int kReducedRows = 32;
constexpr int kReduceThreads = 256;
// A piece of a tile is not made smaller than so many blocks.
constexpr int32_t kMinPieceBlocks = 8;

// Keys of a tile that one workgroup goes through, of each head in turn.
struct Piece {
  int32_t first_query, rows;
  int32_t kv_begin, kv_end;  // the request's keys
  int32_t diagonal;          // as in Request
  int32_t first_block, end_block;
  int32_t partial;  // its slot of each head is partial * heads + head; -1: the tile is whole
};

// A tile whose pieces the reduction merges.
struct SplitTile {
  int32_t first_query, rows;
  int32_t first_partial, count;
};

struct Plan {
  int32_t pieces, split_tiles;
  int32_t reserved[6];
};

// How much there may be of everything.
struct Limits {
  int64_t pieces;          // of one head
  int64_t split_pieces;    // of them those with partial results
  int64_t split_tiles;     // of one head
  int64_t lse_at, out_at;  // bytes: partial lse [split_pieces, heads, 256], partial out [.., 256, 128], fp32
  int64_t bytes;
};

// A tile is cut where it costs more than a workgroup's share, into pieces of at most that: then all pieces together are
// less than twice the shares, of which a head has kWorkgroups / heads.
MLA_HOST_DEVICE inline Limits limits_of(const PrefillParams& p) {
  Limits limits;
  const int64_t tiles = most_head_tiles<kTileQueries>(p);
  const int64_t most_blocks = (p.stored + kBlockKeys - 1) / kBlockKeys;
  const int64_t most_cuts = (most_blocks + kMinPieceBlocks - 1) / kMinPieceBlocks;
  const int64_t shares = 2 * kWorkgroups / p.heads;
  limits.split_pieces = most_cuts < 2 ? 0 : tiles * most_cuts < shares ? tiles * most_cuts : shares;
  if (limits.split_pieces < 2) limits.split_pieces = 0;
  limits.split_tiles = limits.split_pieces / 2;
  limits.pieces = tiles + limits.split_pieces;
  const int64_t rows = limits.split_pieces * p.heads * kTileQueries;
  const int64_t lists =
      int64_t{sizeof(Plan)} + limits.pieces * int64_t{sizeof(Piece)} + limits.split_tiles * int64_t{sizeof(SplitTile)};
  limits.lse_at = (lists + 15) / 16 * 16;
  limits.out_at = limits.lse_at + rows * 4;
  limits.bytes = limits.out_at + rows * kNope * 4;
  return limits;
}

// What is where in PrefillParams::scratch.
struct Scratch {
  Plan* plan;
  Piece* pieces;
  SplitTile* split_tiles;
  float* lse;
  float* out;

  MLA_HOST_DEVICE Scratch(const PrefillParams& p, const Limits& limits) {
    auto* bytes = static_cast<unsigned char*>(p.scratch);
    plan = reinterpret_cast<Plan*>(bytes);
    pieces = reinterpret_cast<Piece*>(bytes + sizeof(Plan));
    split_tiles = reinterpret_cast<SplitTile*>(bytes + sizeof(Plan) + limits.pieces * sizeof(Piece));
    lse = reinterpret_cast<float*>(bytes + limits.lse_at);
    out = reinterpret_cast<float*>(bytes + limits.out_at);
  }
};

}  // namespace mla::gfx9_prefill::fp8
