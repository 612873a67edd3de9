// The generic decode kernel's geometry: how eight warps share a tile, and where things lie in shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/params.h"

namespace mla {

// kTileRows (query, head) rows against blocks of kBlock cached tokens.
//
// Scores: a warp multiplies kRowFragments x 16 rows with kTokenPairs x 16 tokens over a quarter of the 576 columns, so
// that its share of the queries stays in registers; the quarters are added up in shared memory.
// Output: a warp owns 64 of the 512 columns, for all rows.
template <int kTileRows, int kBlock>
struct DecodeShape {
  static constexpr int kRows = kTileRows;
  static constexpr int kTokens = kBlock;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kQuarters = 4;
  static constexpr int kRowGroups = kRows == 64 ? 2 : 1;
  static constexpr int kTokenGroups = kWarps / kQuarters / kRowGroups;
  static constexpr int kRowFragments = kRows / 16 / kRowGroups;
  static constexpr int kTokenPairs = kTokens / 16 / kTokenGroups;
  static constexpr int kSteps = kWidth / 16 / kQuarters;  // of 16 columns

  static constexpr int kOutRowFragments = kRows / 16;
  static constexpr int kOutColumns = kLatent / kWarps;
  static constexpr int kOutPairs = kOutColumns / 16;

  static constexpr int kSoftmaxLanes = 8;  // a row, in one warp
  static constexpr int kSoftmaxRows = kThreads / kSoftmaxLanes;
  static constexpr int kSoftmaxPasses = (kRows + kSoftmaxRows - 1) / kSoftmaxRows;
  static constexpr int kSoftmaxVectors = (kTokens + 31) / 32;  // of 4 tokens, a lane

  // A token is 72 chunks of 16 bytes; chunk c of token n lies at c ^ (n % 8), so that ldmatrix, which reads one chunk
  // of eight neighbouring tokens, meets every bank once although all tokens start at the same bank.
  static constexpr int kTokenChunks = kWidth * 2 / 16;
  static constexpr int kTokenBytes = kWidth * 2;
  static constexpr int kBlockBytes = kTokens * kTokenBytes;
  // Rows padded: by 8 floats, for the 8-byte stores of score fragments; by 16 bytes, for ldmatrix of the weights.
  static constexpr int kScoreStride = kTokens + 8;
  static constexpr int kWeightStride = kTokens + 8;

  static_assert(kRowFragments >= 1 && kTokenPairs >= 1, "every warp has a share of the scores");
  static_assert(kTokens <= kBlockTokens, "a plan cuts at multiples of kBlockTokens");
};

constexpr int kMaxStages = 4;

// A CTA's shared memory, in front of a ring of blocks whose length is known at launch: so everything here has a
// constant address.
template <class Shape>
struct alignas(128) SharedMemory {
  float scores[Shape::kQuarters][Shape::kRows][Shape::kScoreStride];
  uint16_t weights[Shape::kRows][Shape::kWeightStride];  // bits of the element type
  int32_t visible_end[Shape::kRows];                     // first key that a row does not see
  float rescale[Shape::kRows];
  float inverse[Shape::kRows];  // of the sum of the weights
  alignas(16) int32_t slots[kMaxStages][Shape::kTokens];
};

template <class Shape>
constexpr size_t shared_bytes(int stages) {
  return sizeof(SharedMemory<Shape>) + static_cast<size_t>(stages) * Shape::kBlockBytes;
}

}  // namespace mla
