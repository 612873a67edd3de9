// The online softmax of wide tiles. All tokens of a row lie in four lanes of one warp, and a warp of each group has the
// same rows: so each group weighs its block against the references of the round before, and where a score has outgrown
// them, the two warps agree afterwards. References are whole numbers, so that what is then corrected is exact: sums,
// output and weights move by powers of two.
//
// Lane 4 * g + t of a group's warp w has rows 16w + g and 16w + g + 8; of the scores tokens 8j + 2t and 8j + 2t + 1, in
// score[4j], score[4j + 1] for the upper row and score[4j + 2], score[4j + 3] for the lower one.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/decode/sm90/wide/shape.h"
#include "kernels/decode/softmax.h"

namespace mla::sm90::wide {

using Scores = float[kBlockTokens / 2];

// The left operand of a block's product with its values, by 16 tokens: neighbouring scores become its pairs.
using Weights = uint32_t[kBlockSlots][4];

// A lane's two rows.
struct Rows {
  float reference[2] = {-INFINITY, -INFINITY};  // of the exponents, in base 2; -inf: no key seen yet
  float sum[2] = {0, 0};                        // of the weights, over this lane's tokens of this group's blocks
};

// 2^(from - to), of references: 1 where there is none yet.
__device__ __forceinline__ float reference_factor(float from, float to) {
  return to == -INFINITY ? 1 : ptx::exp2_approximate(from - to);
}

// -inf where a row does not see a token. `visible`: how many of the block's tokens each row sees.
__device__ __forceinline__ void mask_scores(const int32_t (&visible)[2], uint32_t valid_slices, Scores& score) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kBlockSlices; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if ((valid_slices >> j & 1) == 0 || j * kSliceTokens + 2 * t + e % 2 >= visible[e / 2]) {
        score[4 * j + e] = -INFINITY;
      }
    }
  }
}

// The references that this block asks for; the sums follow. True: a row of this warp has a new one. Whether a row's
// moves depends on that row alone.
__device__ __forceinline__ bool propose_references(const Scores& score, float factor, Rows& rows,
                                                   float (&proposed)[2]) {
  float highest[2];
  bool outgrown = false;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    highest[e] = -INFINITY;
#pragma unroll
    for (int j = 0; j < kBlockSlices; ++j) {
      highest[e] = fmaxf(highest[e], fmaxf(score[4 * j + 2 * e], score[4 * j + 2 * e + 1]));
    }
    highest[e] *= factor;
    proposed[e] = rows.reference[e];
    outgrown = outgrown || highest[e] > rows.reference[e] + kSlack;
  }
  if (!__any_sync(0xFFFFFFFF, outgrown)) return false;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    highest[e] = combine_over_t(highest[e], fmaxf);
    if (highest[e] > rows.reference[e] + kSlack) {
      proposed[e] = ceilf(highest[e]);
      rows.sum[e] *= reference_factor(rows.reference[e], proposed[e]);
    }
  }
  return true;
}

// P of the block, relative to `references`, to where both groups read it. `target`: of this thread's first 16 bytes.
template <class Element>
__device__ __forceinline__ void write_weights(const Scores& score, float factor, const float (&references)[2],
                                              uint32_t target, Rows& rows) {
  float base[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) base[e] = references[e] == -INFINITY ? 0 : references[e];
#pragma unroll
  for (int k = 0; k < kBlockSlots; ++k) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = i % 2;
      const float first = ptx::exp2_approximate(fmaf(score[8 * k + 2 * i], factor, -base[e]));
      const float second = ptx::exp2_approximate(fmaf(score[8 * k + 2 * i + 1], factor, -base[e]));
      rows.sum[e] += first + second;
      pairs[i] = pack<Element>(first, second);
    }
    ptx::store_shared_16(target + k * kSlotBytes, {pairs[0], pairs[1], pairs[2], pairs[3]});
  }
}

// Where thread `thread` of a group puts its first 16 bytes of a block's weights, and the others a slot further each:
// over the block's rope keys, which nobody reads after the scores.
__device__ __forceinline__ uint32_t weights_address(uint32_t block, int thread) {
  constexpr int kSliceThreads = kSliceChunkBytes / 16;
  return block + thread / kSliceThreads * kSliceBytes + kLatentChunks * kSliceChunkBytes + thread % kSliceThreads * 16;
}

__device__ __forceinline__ void read_weights(uint32_t source, Weights& weights) {
#pragma unroll
  for (int k = 0; k < kBlockSlots; ++k) {
    const uint4 pairs = ptx::load_shared_16(source + k * kSlotBytes);
    weights[k][0] = pairs.x;
    weights[k][1] = pairs.y;
    weights[k][2] = pairs.z;
    weights[k][3] = pairs.w;
  }
}

template <class Element>
__device__ __forceinline__ void scale_weights(const float (&factors)[2], Weights& weights) {
#pragma unroll
  for (int k = 0; k < kBlockSlots; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Vector<Element, 2> pair;
      memcpy(&pair, &weights[k][i], sizeof(pair));
      weights[k][i] = pack<Element>(to_float(pair.at[0]) * factors[i % 2], to_float(pair.at[1]) * factors[i % 2]);
    }
  }
}

}  // namespace mla::sm90::wide
