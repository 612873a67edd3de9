// The kernel of pack_kv_fp8 with values in tiles, as kValueTile says: keys as pack_rows.cuh packs them, and values
// transposed.
//
// A tile of 16 tokens of one head is read in pieces of 16 bytes a lane, all of which are on their way before the first
// is stored. Which token comes with which step is chosen so that a lane's codes of a column stand in the tile's order
// as they are converted; then only columns have to move between lanes, through shared memory of the warp's own, until
// 32 neighbours are one store of 512 bytes.
#pragma once

#include "kernels/cuda/rows.cuh"
#include "kernels/pack/shape.h"

namespace mla {

constexpr int kTileBytes = kNope * kValueTile;

// A tile is one warp's work: a warp for its keys and one for its values gain nothing, and take 4% longer with scales
// other than 1. In fp32 it is two warps' work nevertheless: its 20 KB would be 160 registers of each lane of one warp.
template <class Input>
struct PackTileShape {
  static constexpr int kTileWarps = sizeof(Input) == 2 ? 1 : 2;
  static constexpr int kTiles = kPackThreads / kWarp / kTileWarps;  // of a CTA
  static constexpr int kSharedBytes = kTiles * kTileBytes;
  static constexpr int kCtas = 2;  // of a multiprocessor: as many as registers allow for what lanes have asked for
};

// The token at a position of a tile's column.
__host__ __device__ constexpr int token_at(int position) {
  return position % 2 + position % 4 / 2 * 8 + position / 4 * 2;
}

// Where a column's 16 bytes lie in shared memory: neighbours, which lanes read, in different banks, and so those that
// lanes write together, eight columns apart. They write halves, which change places behind the middle of the tile: then
// the same halves of 16 such columns lie in different banks too.
__device__ __forceinline__ int staged_byte(int column) { return (column ^ column / 8 % 8) * kValueTile; }
__device__ __forceinline__ int staged_half(int column, int half) { return half ^ column / (kNope / 2); }

// Half of the up-projection's columns for a tile's tokens: a step brings a group of columns of one token to each lane,
// for two tokens where that is half a warp.
template <class Input>
struct TileSteps {
  static constexpr int kCount = 16 / sizeof(Input);
  static constexpr int kGroups = kNope / kCount;
  static constexpr int kSteps = kValueTile * kGroups / kWarp;
  GroupBits<Input, kCount> read[kSteps];

  static __device__ __forceinline__ int column(int lane) { return lane % kGroups * kCount; }
  static __device__ __forceinline__ int first_position(int lane) { return lane / kGroups * kSteps; }
  static __device__ __forceinline__ int token(int step, int lane) {
    return token_at(first_position(lane)) + token_at(step);
  }

  // `up`: the first token's row at the first column.
  __device__ __forceinline__ void load(const Input* up, int32_t heads, int left, int lane) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (token(step, lane) >= left) continue;
      read[step] = load_group<Input, kCount>(up + int64_t{token(step, lane)} * heads * kUpWidth + column(lane));
    }
  }
};

// A tile of a head, of which `left` tokens exist.
struct Tile {
  int64_t row;  // of the tile's heads
  int64_t first_token;
  int64_t first_row;  // of (token, head)
  int left;

  __device__ __forceinline__ Tile(const PackKvParams& p, int64_t row) : row(row) {
    const int64_t tile = row / p.heads;
    first_token = tile * kValueTile;
    first_row = first_token * p.heads + (row - tile * p.heads);
    const int64_t tokens_left = p.tokens - first_token;
    left = tokens_left < kValueTile ? static_cast<int>(tokens_left) : kValueTile;
  }
};

// Bytes of all ones for the tokens at kCount positions that exist.
template <int kCount>
__device__ __forceinline__ GroupBits<E4M3FN, kCount> existing(int first_position, int left) {
  GroupBits<E4M3FN, kCount> mask{};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (token_at(first_position) + token_at(i) < left) mask.words[i / 4] |= 0xFFu << i % 4 * 8;
  }
  return mask;
}

template <class Input>
struct TileValues {
  using Steps = TileSteps<Input>;
  Steps up;

  __device__ __forceinline__ void load(const PackKvParams& p, const Tile& tile, int lane) {
    up.load(static_cast<const Input*>(p.kv_up) + tile.first_row * kUpWidth + kNope, p.heads, tile.left, lane);
  }

  __device__ __forceinline__ void store(const PackKvParams& p, const Tile& tile, int lane,
                                        unsigned char* staged) const {
    constexpr int kSteps = Steps::kSteps;
    const Divisor divide(scale_of(p.packed_v_scale));
    const auto exists = existing<kSteps>(Steps::first_position(lane), tile.left);  // behind them are zeros
#pragma unroll
    for (int i = 0; i < Steps::kCount; ++i) {
      GroupBits<float, kSteps> x;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) x.words[step] = __float_as_uint(element_at(up.read[step], i));
      const auto codes = convert_group<E4M3FN>(x, {1, divide, p.saturate});
      const int column = Steps::column(lane) + i;
#pragma unroll
      for (int half = 0; half < kSteps / 8; ++half) {
        const int to = staged_half(column, Steps::first_position(lane) / 8 + half);
        *reinterpret_cast<uint2*>(staged + staged_byte(column) + to * 8) = make_uint2(
            codes.words[2 * half] & exists.words[2 * half], codes.words[2 * half + 1] & exists.words[2 * half + 1]);
      }
    }
    __syncwarp();
    uint8_t* v = static_cast<uint8_t*>(p.v) + tile.row * kTileBytes;
#pragma unroll
    for (int first = 0; first < kNope; first += kWarp) {
      const int column = first + lane;
      const uint4 x = *reinterpret_cast<const uint4*>(staged + staged_byte(column));
      const bool changed = first >= kNope / 2;
      store_words(v + column * kValueTile, changed ? x.z : x.x, changed ? x.w : x.y, changed ? x.x : x.z,
                  changed ? x.y : x.w);
    }
  }
};

template <class Input, class Rope>
struct TileKeys {
  using Steps = TileSteps<Input>;
  static constexpr int kCount = Steps::kCount;
  using RopeSteps = RowSteps<kRope / kCount>;
  static constexpr int kRopeSteps = kValueTile / RopeSteps::kRowsAStep;
  Steps up;
  GroupBits<Rope, kCount> rope[kRopeSteps];

  __device__ __forceinline__ void load(const PackKvParams& p, const Tile& tile, int lane) {
    up.load(static_cast<const Input*>(p.kv_up) + tile.first_row * kUpWidth, p.heads, tile.left, lane);
    const Rope* k_pe = static_cast<const Rope*>(p.k_pe) + p.k_pe_offset + tile.first_token * p.k_pe_stride;
#pragma unroll
    for (int step = 0; step < kRopeSteps; ++step) {
      const int token = RopeSteps::row(step, lane);
      if (token >= tile.left) continue;
      rope[step] = load_group<Rope, kCount>(k_pe + token * p.k_pe_stride + RopeSteps::group(step, lane) * kCount);
    }
  }

  __device__ __forceinline__ void store(const PackKvParams& p, const Tile& tile, int lane) const {
    const float k_scale = sizeof(Rope) == 1 ? scale_of(p.k_scale) : 1;
    const Divisor divide(scale_of(p.packed_k_scale));
    E4M3FN* k = static_cast<E4M3FN*>(p.k) + tile.first_row * kHeadDim;
    const int64_t token_stride = int64_t{p.heads} * kHeadDim;
#pragma unroll
    for (int step = 0; step < Steps::kSteps; ++step) {
      const int token = Steps::token(step, lane);
      if (token >= tile.left) continue;
      store_group(k + token * token_stride + Steps::column(lane),
                  convert_group<E4M3FN>(up.read[step], {1, divide, p.saturate}));
    }
#pragma unroll
    for (int step = 0; step < kRopeSteps; ++step) {
      const int token = RopeSteps::row(step, lane);
      if (token >= tile.left) continue;
      store_group(k + token * token_stride + kNope + RopeSteps::group(step, lane) * kCount,
                  convert_group<E4M3FN>(rope[step], {k_scale, divide, p.saturate}));
    }
  }
};

template <class Input, class Rope>
__device__ __forceinline__ void pack_tile(const PackKvParams& p, unsigned char* shared) {
  constexpr int kTiles = PackTileShape<Input>::kTiles;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Tile tile(p, int64_t{blockIdx.x} * kTiles + warp % kTiles);
  if (tile.left <= 0) return;
  unsigned char* const staged = shared + warp % kTiles * kTileBytes;
  TileValues<Input> values;
  TileKeys<Input, Rope> keys;
  if constexpr (PackTileShape<Input>::kTileWarps == 1) {
    values.load(p, tile, lane);
    keys.load(p, tile, lane);
    values.store(p, tile, lane, staged);
    keys.store(p, tile, lane);
  } else if (warp < kTiles) {
    values.load(p, tile, lane);
    values.store(p, tile, lane, staged);
  } else {
    keys.load(p, tile, lane);
    keys.store(p, tile, lane);
  }
}

}  // namespace mla
