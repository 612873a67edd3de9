// The kernel of pack_kv_fp8 with values in tiles, as kValueTile says: keys as pack_rows.cuh packs them, and values
// transposed.
//
// A warp has 16 tokens of one head, so a whole tile, and reads their rows of the up-projection in pieces of 16 bytes a
// lane. Which token comes with which step is chosen so that a lane's codes of a column stand in the tile's order as
// they are converted; then only columns have to move between lanes, through shared memory of the warp's own, until 32
// neighbours are one store of 512 bytes.
#pragma once

#include "kernels/cuda/rows.cuh"
#include "kernels/pack/shape.h"

namespace mla {

constexpr int kTileBytes = kNope * kValueTile;
constexpr int kPackTiles = kPackThreads / kWarp;  // of a CTA
constexpr int kPackTilesShared = kPackTiles * kTileBytes;

// Whether keys are on their way beside values, in twice the registers, or when values have been converted.
#if !defined(MLA_PACK_KEYS_BESIDE)
#define MLA_PACK_KEYS_BESIDE 1
#endif
template <class Input>
constexpr bool kKeysBesideValues = MLA_PACK_KEYS_BESIDE && sizeof(Input) == 2;

// The token at a position of a tile's column.
__host__ __device__ constexpr int token_at(int position) {
  return position % 2 + position % 4 / 2 * 8 + position / 4 * 2;
}

// Where a column's 16 bytes lie in shared memory: neighbours, which lanes read, in different banks, and so those that
// lanes write together, eight columns apart. They write halves, which change places behind the middle of the tile: then
// the same halves of 16 such columns lie in different banks too.
__device__ __forceinline__ int staged_byte(int column) { return (column ^ column / 8 % 8) * kValueTile; }
__device__ __forceinline__ int staged_half(int column, int half) { return half ^ column / (kNope / 2); }

// A warp's tile: steps bring a group of columns of one token to each lane, for two tokens where rows are short enough.
template <class Input>
struct TileSteps {
  static constexpr int kCount = 16 / sizeof(Input);
  static constexpr int kGroups = kNope / kCount;
  static constexpr int kSteps = kValueTile * kGroups / kWarp;

  static __device__ __forceinline__ int column(int lane) { return lane % kGroups * kCount; }
  static __device__ __forceinline__ int first_position(int lane) { return lane / kGroups * kSteps; }
};

// Codes of `left` tokens' values from what the lanes have read, to the warp's shared memory.
template <class Input>
__device__ __forceinline__ void stage_values(
    const GroupBits<Input, TileSteps<Input>::kCount> (&read)[TileSteps<Input>::kSteps], const Conversion& conversion,
    int left, int lane, unsigned char* staged) {
  using Steps = TileSteps<Input>;
  constexpr int kSteps = Steps::kSteps;
  const bool divides = !conversion.divide.is_one();
  const int first_position = Steps::first_position(lane);
  GroupBits<E4M3FN, kSteps> exists;  // tokens behind the last are zeros
#pragma unroll
  for (int word = 0; word < exists.kWords; ++word) {
    exists.words[word] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (token_at(first_position + word * 4 + i) < left) exists.words[word] |= 0xFFu << i * 8;
    }
  }
#pragma unroll
  for (int i = 0; i < Steps::kCount; ++i) {
    float x[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) x[step] = element_at(read[step], i);
    if (divides) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) x[step] = conversion.divide.divide(x[step]);
    }
    const GroupBits<E4M3FN, kSteps> codes = from_floats<E4M3FN>(x, conversion.saturate);
    const int column = Steps::column(lane) + i;
#pragma unroll
    for (int half = 0; half < kSteps / 8; ++half) {
      const int to = staged_half(column, first_position / 8 + half);
      *reinterpret_cast<uint2*>(staged + staged_byte(column) + to * 8) = make_uint2(
          codes.words[2 * half] & exists.words[2 * half], codes.words[2 * half + 1] & exists.words[2 * half + 1]);
    }
  }
}

template <class Input, class Rope>
__device__ __forceinline__ void pack_tile(const PackKvParams& p, unsigned char* shared) {
  using Steps = TileSteps<Input>;
  using RopeSteps = RowSteps<kRope / Steps::kCount>;
  constexpr int kCount = Steps::kCount, kSteps = Steps::kSteps;
  constexpr int kRopeSteps = kValueTile / RopeSteps::kRowsAStep;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t tile_row = int64_t{blockIdx.x} * kPackTiles + warp;  // of a (tile, head)
  const int64_t first_token = tile_row / p.heads * kValueTile;
  if (first_token >= p.tokens) return;
  const int64_t tokens_left = p.tokens - first_token;
  const int left = tokens_left < kValueTile ? static_cast<int>(tokens_left) : kValueTile;
  const int64_t first_row = first_token * p.heads + tile_row % p.heads;
  const int lane_token = token_at(Steps::first_position(lane)), column = Steps::column(lane);
  const auto token_of = [&](int step) { return lane_token + token_at(step); };

  const Input* up = static_cast<const Input*>(p.kv_up) + first_row * kUpWidth + column;
  GroupBits<Input, kCount> values[kSteps], nope[kSteps];
  GroupBits<Rope, kCount> rope[kRopeSteps];
  const auto load_up = [&](GroupBits<Input, kCount>(&read)[kSteps], int first_column) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int token = token_of(step);
      if (token >= left) continue;
      read[step] = load_group<Input, kCount>(up + int64_t{token} * p.heads * kUpWidth + first_column);
    }
  };
  const auto load_key = [&] {
    load_up(nope, 0);
    const Rope* k_pe = static_cast<const Rope*>(p.k_pe) + p.k_pe_offset + first_token * p.k_pe_stride;
#pragma unroll
    for (int step = 0; step < kRopeSteps; ++step) {
      const int token = RopeSteps::row(step, lane);
      if (token >= left) continue;
      rope[step] = load_group<Rope, kCount>(k_pe + token * p.k_pe_stride + RopeSteps::group(step, lane) * kCount);
    }
  };

  load_up(values, kNope);
  if constexpr (kKeysBesideValues<Input>) load_key();
  unsigned char* const staged = shared + warp * kTileBytes;
  stage_values<Input>(values, {1, Divisor(scale_of(p.packed_v_scale)), p.saturate}, left, lane, staged);
  if constexpr (!kKeysBesideValues<Input>) load_key();
  __syncwarp();
  uint8_t* v = static_cast<uint8_t*>(p.v) + tile_row * kTileBytes;
#pragma unroll
  for (int first = 0; first < kNope; first += kWarp) {
    const int own = first + lane;
    const uint4 x = *reinterpret_cast<const uint4*>(staged + staged_byte(own));
    const bool changed = first >= kNope / 2;
    store_words(v + own * kValueTile, changed ? x.z : x.x, changed ? x.w : x.y, changed ? x.x : x.z,
                changed ? x.y : x.w);
  }

  const float k_scale = sizeof(Rope) == 1 ? scale_of(p.k_scale) : 1;
  const Divisor key_divide(scale_of(p.packed_k_scale));
  E4M3FN* k = static_cast<E4M3FN*>(p.k) + first_row * kHeadDim;
  const int64_t token_stride = int64_t{p.heads} * kHeadDim;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int token = token_of(step);
    if (token >= left) continue;
    store_group(k + token * token_stride + column, convert_group<E4M3FN>(nope[step], {1, key_divide, p.saturate}));
  }
#pragma unroll
  for (int step = 0; step < kRopeSteps; ++step) {
    const int token = RopeSteps::row(step, lane);
    if (token >= left) continue;
    store_group(k + token * token_stride + kNope + RopeSteps::group(step, lane) * kCount,
                convert_group<E4M3FN>(rope[step], {k_scale, key_divide, p.saturate}));
  }
}

}  // namespace mla
