// The generic decode kernel's geometry: how eight warps share a tile, and where things lie in shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/decode/work.cuh"
#include "kernels/params.h"

namespace mla {

// kTileRows (query, head) rows against blocks of kBlock cached tokens, of elements of kBytes bytes.
//
// Scores: a warp multiplies kRowFragments x 16 rows with kTokenPairs x 16 tokens over a quarter of the 576 columns, so
// that its share of the queries stays in registers; the quarters are added up in shared memory. A quarter is every
// fourth group of 16 columns: its last group is its part of the rope.
// Output: a warp owns 64 of the 512 columns, every eighth group of 16, for all rows.
//
// kScaled: keys have a scale for each 128 latent columns (fp8_ds_mla). Columns then lie in an order in which those of
// one scale are a quarter's, and so are all columns of a warp's output.
template <int kTileRows, int kBlock, int kBytes, bool kScaled = false>
struct DecodeShape {
  static constexpr bool kGroupScales = kScaled;
  static constexpr int kRows = kTileRows;
  static constexpr int kTokens = kBlock;
  static constexpr int kElementBytes = kBytes;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kQuarters = 4;
  static constexpr int kRowGroups = kRows == 64 ? 2 : 1;
  static constexpr int kTokenGroups = kWarps / kQuarters / kRowGroups;
  static constexpr int kRowFragments = kRows / 16 / kRowGroups;
  static constexpr int kTokenPairs = kTokens / 16 / kTokenGroups;
  static constexpr int kSteps = kWidth / 16 / kQuarters;  // groups of 16 columns
  static constexpr int kKeyStep = kQuarters * 16;         // columns from one group of a warp to the next

  static constexpr int kOutRowFragments = kRows / 16;
  static constexpr int kOutPairs = kLatent / kWarps / 16;
  static constexpr int kValueStep = kWarps * 16;

  // Of the 32 groups of 16 latent columns, the one that lies at `place`.
  static __host__ __device__ constexpr int column_group(int place) {
    return kScaled ? place % kQuarters * (kLatent / 16 / kQuarters) + place / kQuarters : place;
  }

  static constexpr int kSoftmaxLanes = 8;  // a row, in one warp
  static constexpr int kSoftmaxRows = kThreads / kSoftmaxLanes;
  static constexpr int kSoftmaxPasses = (kRows + kSoftmaxRows - 1) / kSoftmaxRows;
  static constexpr int kSoftmaxVectors = (kTokens + 31) / 32;  // of 4 tokens, a lane

  // A token is 72 chunks of 16 bytes, or 36 of fp8; chunk c of token n lies at c ^ swizzle(n), so that ldmatrix, which
  // reads one chunk of eight neighbouring tokens, meets every bank once. Tokens of 1152 bytes all start at the same
  // bank; those of 576 start at two banks in turn, and 36 chunks leave only the lower two bits to swap.
  static constexpr int kTokenBytes = kWidth * kElementBytes;
  static constexpr int kTokenChunks = kTokenBytes / 16;
  static constexpr int kBlockBytes = kTokens * kTokenBytes;
  static __host__ __device__ constexpr int swizzle(int token) { return kElementBytes == 1 ? token / 2 % 4 : token % 8; }
  static constexpr int kCopyLanes = kElementBytes == 1 ? 4 : 8;  // threads that copy a token, a chunk each at once

  // Rows padded: by 8 floats, for the 8-byte stores of score fragments; by 16 bytes, for ldmatrix of the weights.
  static constexpr int kScoreStride = kTokens + 8;
  static constexpr int kWeightStride = kTokens + 8;

  static_assert(kRowFragments >= 1 && kTokenPairs >= 1, "every warp has a share of the scores");
  static_assert(kLatent % kKeyStep == 0, "every quarter has whole groups of latent columns");
  static_assert(kTokens <= kBlockTokens, "a plan cuts at multiples of kBlockTokens");
  static_assert(kTokenChunks % kCopyLanes == 0, "the threads of a token have equal shares");
};

constexpr int kMaxStages = 4;

// A CTA's shared memory, in front of a ring of blocks whose length is known at launch: so everything here has a
// constant address.
template <class Shape>
struct alignas(128) SharedMemory {
  float scores[Shape::kQuarters][Shape::kRows][Shape::kScoreStride];
  uint16_t weights[Shape::kRows][Shape::kWeightStride];  // bits of the tensor cores' type
  float query_scale[Shape::kRows][Shape::kQuarters];     // fp8 caches alone: of a row's quarter in `scores`
  int32_t visible_end[Shape::kRows];                     // first key that a row does not see
  float rescale[Shape::kRows];
  float inverse[Shape::kRows];  // of the sum of the weights
  alignas(16) int32_t slots[kMaxStages][Shape::kTokens];
  // What the loop over an item's keys has no registers for:
  Tile tile;
  const unsigned char* layer;  // of the cache
  float scale;                 // of the scores, in base 2
};

}  // namespace mla
