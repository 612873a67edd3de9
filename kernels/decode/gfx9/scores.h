// S^T = K Q^T for a block of tokens, and the weights that follow from it.
#pragma once

#include "kernels/decode/gfx9/formats.h"
#include "kernels/decode/softmax.h"

namespace mla::gfx9 {

constexpr int kLatentSteps = kLatent / kProductDepth;

// A wave's queries: lane l has columns 32 * k + 8 * (l / 16) + e of row l % 16 of each 16.
template <class Element, class Shape>
using Queries = Fragment<Element>[Shape::kRowFragments][Shape::kSteps];

// Lane l has tokens 4 * (l / 16) + r of 16, and row l % 16.
template <class Shape>
using Scores = F32x4[Shape::kRowFragments][Shape::kTokenFragments];

// Eight elements of a query, from 16-bit elements or from the architecture's 8-bit ones.
template <class Element, class Query>
__device__ __forceinline__ Fragment<Element> load_eight(const Query* source, bool exists) {
  if constexpr (sizeof(Query) == 2) {
    static_assert(std::is_same_v<Element, Query>);
    U32x4 bits = *reinterpret_cast<const U32x4*>(source);
    if (!exists) bits = U32x4{};
    return bits_as<Fragment<Element>>(bits);
  } else {
    U32x2 codes = *reinterpret_cast<const U32x2*>(source);
    if (!exists) codes = U32x2{};
    return bits_as<Fragment<Element>>(unpack_eight<Element>(codes.x, codes.y));
  }
}

// Rows that do not exist are 0.
template <class Query, class Element, class Shape, class Params>
__device__ __forceinline__ void load_queries(const Params& p, int64_t first_row, int32_t rows, int row_group, int lane,
                                             Queries<Element, Shape>& queries) {
#pragma unroll
  for (int m = 0; m < Shape::kRowFragments; ++m) {
    const int row = (row_group * Shape::kRowFragments + m) * 16 + lane % 16;
    const bool exists = row < rows;
    const int64_t global_row = first_row + (exists ? row : 0);
    const Query* latent = static_cast<const Query*>(p.q_latent) + global_row * p.q_latent_stride;
    const Query* rope = static_cast<const Query*>(p.q_rope) + global_row * p.q_rope_stride;
#pragma unroll
    for (int k = 0; k < Shape::kSteps; ++k) {
      const int column = k * kProductDepth + lane / 16 * 8;
      queries[m][k] = load_eight<Element>(k < kLatentSteps ? latent + column : rope + column - kLatent, exists);
    }
  }
}

// Sums of products, times the scales of a lane's tokens, are added to the scores.
template <class Shape, int kSums>
__device__ __forceinline__ void add_scaled(const float* scales,
                                           F32x4 (&sums)[Shape::kRowFragments][Shape::kTokenFragments][kSums],
                                           Scores<Shape>& scores) {
#pragma unroll
  for (int n = 0; n < Shape::kTokenFragments; ++n) {
    const F32x4 factors = *reinterpret_cast<const F32x4*>(scales + n * 16);
#pragma unroll
    for (int m = 0; m < Shape::kRowFragments; ++m) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        scores[m][n] += sums[m][n][i] * factors;
        sums[m][n][i] = F32x4{};
      }
    }
  }
}

template <class Element, class Shape, class Shared>
__device__ __forceinline__ void score_block(const Shared& shared, const Block& block,
                                            const Queries<Element, Shape>& queries, int token_group, int lane,
                                            Scores<Shape>& scores) {
  constexpr int kGroupSteps = kDsMlaGroup / kProductDepth;
  // A product waits for the one whose sum it adds to: a few sums in turn.
  constexpr int kSums = Shape::kRowFragments * Shape::kTokenFragments == 1 ? 3 : 2;
  F32x4 sums[Shape::kRowFragments][Shape::kTokenFragments][kSums] = {};
  const int first = token_group * Shape::kTokenFragments * 16, token = first + lane % 16, chunk = lane / 16;
  const unsigned char* latent = block.latent[token] + chunk * 16;
  if constexpr (Shared::kScaled) {
#pragma unroll
    for (int m = 0; m < Shape::kRowFragments; ++m) {
#pragma unroll
      for (int n = 0; n < Shape::kTokenFragments; ++n) scores[m][n] = F32x4{};
    }
  }
  // Keys come in groups of steps. While one is multiplied the next is read.
  constexpr int kReadSteps = 6, kReads = Shape::kSteps / kReadSteps;
  static_assert(kReads * kReadSteps == Shape::kSteps);
  U32x4 keys[2][kReadSteps][Shape::kTokenFragments];
  const auto read = [&](int group) {
#pragma unroll
    for (int i = 0; i < kReadSteps; ++i) {
      const int k = group * kReadSteps + i;
#pragma unroll
      for (int n = 0; n < Shape::kTokenFragments; ++n) {
        const unsigned char* source =
            k < kLatentSteps ? latent + n * 16 * Block::kLatentStride + k * 4 * 16
                             : block.rope[token + n * 16] + Block::rope_place(token, (k - kLatentSteps) * 4 + chunk);
        keys[group % 2][i][n] = *reinterpret_cast<const U32x4*>(source);
      }
    }
  };
  read(0);
#pragma unroll
  for (int k = 0; k < Shape::kSteps; ++k) {
    const int group = k / kReadSteps;
    if (k % kReadSteps == 0) {
      wait_for_lds();
      if (group + 1 < kReads) read(group + 1);
    }
#pragma unroll
    for (int n = 0; n < Shape::kTokenFragments; ++n) {
      const auto own = bits_as<Fragment<Element>>(static_cast<U32x4>(keys[group % 2][k % kReadSteps][n]));
#pragma unroll
      for (int m = 0; m < Shape::kRowFragments; ++m) {
        sums[m][n][k % kSums] = multiply(own, queries[m][k], sums[m][n][k % kSums]);
      }
    }
    if constexpr (Shared::kScaled) {
      if (k < kLatentSteps && k % kGroupSteps == kGroupSteps - 1) {
        add_scaled<Shape>(&shared.key_scales[k / kGroupSteps][first + chunk * 4], sums, scores);
      }
    }
  }
  __builtin_amdgcn_sched_barrier(0);  // the sums are waited for once, behind the last product
#pragma unroll
  for (int m = 0; m < Shape::kRowFragments; ++m) {
#pragma unroll
    for (int n = 0; n < Shape::kTokenFragments; ++n) {
      scores[m][n] = Shared::kScaled ? scores[m][n] + sums[m][n][0] : sums[m][n][0];
#pragma unroll
      for (int i = 1; i < kSums; ++i) scores[m][n] += sums[m][n][i];
    }
  }
}

// Of the rows that a lane has scores of, shared with the lanes that have other tokens of them.
template <class Shape>
struct Softmax {
  float reference[Shape::kRowFragments];  // of the exponents, in base 2; the same in all of the row's lanes
  F32x2 sums[Shape::kRowFragments];       // over this lane's even tokens, and its odd ones
};

// The reference before a row's first finite score. A finite one: differences to it are never NaN.
constexpr float kNoReference = -__FLT_MAX__;

// As Largest. The compiler, which does not know that no operand is a signalling NaN, would make them quiet first.
struct LargestOfResults {
  __device__ __forceinline__ float operator()(float a, float b) const {
    float largest;
    asm("v_max_f32 %0, %1, %2" : "=v"(largest) : "v"(a), "v"(b));
    return largest;
  }
};

// Over the four lanes that have the same row.
template <class Combine>
__device__ __forceinline__ float reduce_over_row(float value, Combine combine) {
  value = combine(value, shuffle_xor(value, 16));
  return combine(value, shuffle_xor(value, 32));
}

// Scores in base 2; -inf where the row does not see the token. `valid`: which tokens of the block exist; `visible`: the
// first that the row does not see; `all_visible`: every row sees the whole block, if all its tokens exist. Gives by row
// the highest.
template <class Shape>
__device__ __forceinline__ void mask_scores(uint32_t valid, const int32_t (&visible)[Shape::kRowFragments],
                                            bool all_visible, float scale, int token_group, int lane,
                                            Scores<Shape>& scores, float (&highest)[Shape::kRowFragments]) {
#pragma unroll
  for (int m = 0; m < Shape::kRowFragments; ++m) {
#pragma unroll
    for (int n = 0; n < Shape::kTokenFragments; ++n) scores[m][n] *= scale;
  }
  if ((all_visible ? valid : 0) != ~0u) {
#pragma unroll
    for (int m = 0; m < Shape::kRowFragments; ++m) {
#pragma unroll
      for (int n = 0; n < Shape::kTokenFragments; ++n) {
        const int token = (token_group * Shape::kTokenFragments + n) * 16 + lane / 16 * 4;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const bool seen = (valid >> (token + r) & 1) != 0 && token + r < visible[m];
          scores[m][n][r] = seen ? scores[m][n][r] : -INFINITY;
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < Shape::kRowFragments; ++m) {
    highest[m] = -INFINITY;
#pragma unroll
    for (int n = 0; n < Shape::kTokenFragments; ++n) {
#pragma unroll
      for (int r = 0; r < 4; ++r) highest[m] = __builtin_fmaxf(highest[m], scores[m][n][r]);
    }
    highest[m] = reduce_over_row(highest[m], LargestOfResults());
  }
}

// Weights 2^(score - reference), written for all waves to read.
template <class Element, class Shape, class Shared>
__device__ __forceinline__ void weigh_block(Shared& shared, const Scores<Shape>& scores,
                                            const float (&highest)[Shape::kRowFragments], int row_group,
                                            int token_group, int lane, Softmax<Shape>& softmax) {
#pragma unroll
  for (int m = 0; m < Shape::kRowFragments; ++m) {
    const int row = (row_group * Shape::kRowFragments + m) * 16 + lane % 16;
    float& reference = softmax.reference[m];
    float factor = 1;
    if (highest[m] > reference + kSlack) {
      factor = exp2_approximate(reference - highest[m]);
      reference = highest[m];
    }
    softmax.sums[m] *= factor;
    shared.rescale[token_group][row % 16][row / 16] = factor;
#pragma unroll
    for (int n = 0; n < Shape::kTokenFragments; ++n) {
      F32x4 weights = scores[m][n] + F32x4(-reference);
#pragma unroll
      for (int r = 0; r < 4; ++r) weights[r] = exp2_approximate(weights[r]);
      softmax.sums[m] += weights.lo;
      softmax.sums[m] += weights.hi;
      const int token = (token_group * Shape::kTokenFragments + n) * 16 + lane / 16 * 4;
      *reinterpret_cast<U32x2*>(&shared.weights[row][token]) = pack_weights<Element>(weights);
    }
  }
}

}  // namespace mla::gfx9
