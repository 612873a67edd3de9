// The geometry of the decode kernels for gfx942 and gfx950: how four waves share a tile of (query, head) rows and a
// block of tokens, and where things lie in LDS.
#pragma once

#include "kernels/params.h"
#include "kernels/rocm/lds.h"
#include "kernels/rocm/mfma.h"

namespace mla::gfx9 {

// Both products have the (query, head) rows as columns: S^T = K Q^T and O^T += V^T P^T. A lane then has one row of each
// 16, four neighbouring tokens of its scores, and one factor for all its sums of the output.
//
// Scores: kRowGroups x kTokenGroups waves, each with the queries of its rows in registers.
// Output: a wave owns 128 of the 512 columns, for all rows; the weights come to it through LDS.
template <int kTileRows>
struct Shape {
  static constexpr int kRows = kTileRows;
  static constexpr int kTokens = 32;  // of a block
  static constexpr int kWaves = 4;
  static constexpr int kThreads = kWave * kWaves;
  static constexpr int kRowGroups = kRows == 32 ? 2 : 4;
  static constexpr int kTokenGroups = kWaves / kRowGroups;
  static constexpr int kRowFragments = kRows / 16 / kRowGroups;        // of 16 rows, a wave
  static constexpr int kTokenFragments = kTokens / 16 / kTokenGroups;  // of 16 tokens, a wave
  static constexpr int kSteps = kWidth / kProductDepth;                // of the scores' products
  static constexpr int kOutRowFragments = kRows / 16;
  static constexpr int kOutColumns = kLatent / kWaves;
  static constexpr int kOutFragments = kOutColumns / 16;
  static_assert(kTokens == kProductDepth, "a block is one product deep");
  static_assert(kBlockTokens % kTokens == 0, "a plan cuts at multiples of kBlockTokens");
};

// Four weights as elements. Where one is NaN so is the sum of its row, by which all is divided: it may become anything.
template <class Element>
__device__ __forceinline__ U32x2 pack_weights(F32x4 weights) {
  if constexpr (kGfx950 || !std::is_same_v<Element, BF16>) {
    using Four = Element __attribute__((ext_vector_type(4)));
    return bits_as<U32x2>(__builtin_convertvector(weights, Four));
  } else {
    constexpr uint32_t kHighHalves = 0x07060302;
    uint32_t rounded[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const auto bits = bits_as<uint32_t>(static_cast<float>(weights[r]));
      rounded[r] = bits + 0x8000;  // to the nearest; half way, up: an instruction less than to the even one
    }
    return {__builtin_amdgcn_perm(rounded[1], rounded[0], kHighHalves),
            __builtin_amdgcn_perm(rounded[3], rounded[2], kHighHalves)};
  }
}

// The lane's number, and the compiler does not know that it stays the same: what follows from it is computed where it
// is used, instead of once in front of all loops, from where it would take registers throughout.
__device__ __forceinline__ int lane_anew() {
  int lane = lane_id();
  asm volatile("" : "+v"(lane));
  return lane & (kWave - 1);
}

// A block of tokens as 16-bit elements. The latent columns of a token and its rope columns lie apart: the wave's 64
// lanes copy 1024 bytes at once, which are those of one token, or the rope of eight.
//
// Neighbouring tokens start four banks apart, so that the same 16 bytes of eight tokens, as the scores read them, are
// on different banks. Rope keys have no room for that: chunk c of token t, 16 bytes, lies at c ^ (t % 8).
struct Block {
  static constexpr int kTokens = 32;
  static constexpr int kLatentStride = 2 * kLatent + 16;
  static constexpr int kRopeStride = 2 * kRope;
  alignas(16) unsigned char latent[kTokens][kLatentStride];
  alignas(16) unsigned char rope[kTokens][kRopeStride];

  static __device__ __forceinline__ constexpr int rope_place(int token, int chunk) { return (chunk ^ token % 8) * 16; }
};

// kHasScales: keys have a scale for each 128 latent columns (fp8_ds_mla).
template <class Shape, int kStages, bool kHasScales>
struct Shared {
  static constexpr bool kScaled = kHasScales;
  // Rows padded by 16 bytes: eight rows' equal columns are on different banks.
  static constexpr int kWeightStride = Shape::kTokens + 8;
  Block blocks[kStages];
  alignas(16) uint16_t weights[Shape::kRows][kWeightStride];  // P
  alignas(16) float key_scales[kScaled ? kLatent / kDsMlaGroup : 1][kScaled ? Shape::kTokens : 1];
  float highest[Shape::kTokenGroups][Shape::kRows];  // score of a block
  // Factors of what was summed up before, of row 16 * m + i at [i][m]; each group has all.
  alignas(16) float rescale[Shape::kTokenGroups][16][Shape::kOutRowFragments];
  float sums[Shape::kTokenGroups][Shape::kRows];  // of an item's weights
  uint8_t valid[Shape::kWaves];                   // of a block: a bit for each token that exists
};

}  // namespace mla::gfx9
