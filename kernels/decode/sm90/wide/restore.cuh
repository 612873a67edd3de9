// What large weights have lost by rounding, added to the output at an item's end, times their tokens' values. Where the
// reference of the exponents follows every maximum, a row's largest weight is 1 and has lost nothing, and in passing
// others have been exact; where it does not, a few weights restored make up for that.
//
// A lane has seen an eighth of its rows' tokens, and remembers of each row the one with the largest score. Of a row's
// eight, those whose weights have lost most are restored.
#pragma once

#include <cstring>

#include "kernels/cuda/element.cuh"
#include "kernels/decode/sm90/wide/finish.cuh"
#include "kernels/decode/sm90/wide/products.cuh"

namespace mla::sm90::wide {

constexpr int kRestored = 2;  // weights of a row. One is not enough to be as exact as with a reference that follows.

// Of a token's weight, what rounding has taken from it.
struct Loss {
  float amount = 0;
  int32_t token = -1;

  // An order of all losses of a row, whoever compares them.
  __device__ __forceinline__ bool exceeds(const Loss& other) const {
    const float a = fabsf(amount), b = fabsf(other.amount);
    return a > b || (a == b && token < other.token);
  }
};

// Of a row, the largest first.
struct Losses {
  Loss at[kRestored];

  __device__ __forceinline__ void insert(Loss loss) {
#pragma unroll
    for (Loss& each : at) {
      if (!loss.exceeds(each)) continue;
      const Loss smaller = each;
      each = loss;
      loss = smaller;
    }
  }
};

// Of this lane's token in row `e`.
template <class Element>
__device__ __forceinline__ Loss loss_of(const Attention& a, const Rows& rows, int e) {
  const Largest& largest = rows.largest[e];
  if (largest.token < 0) return {};
  const float factor = a.scale <= 0 ? 1 : a.scale;  // as of prepare_scores
  const float base = rows.reference[e] == -INFINITY ? 0 : rows.reference[e];
  const float weight = ptx::exp2_approximate(fmaf(largest.score, factor, -base));
  return {weight - to_float(from_float<Element>(weight)), largest.token};
}

// Of a lane's two rows, over the four lanes and both groups. It goes through the buffer of the weights, and all
// attending warps have to meet before the next ones.
template <class Element, int kGroup>
__device__ __forceinline__ void find_losses(const Attention& a, const Rows& rows, Losses (&losses)[2]) {
  const Loss own[2] = {loss_of<Element>(a, rows, 0), loss_of<Element>(a, rows, 1)};
  ptx::barrier_sync(kItemBarrier, kAttendThreads);  // the item's last weights have been read
  ptx::store_shared_16(a.weights + kGroup * kStepBytes,
                       {__float_as_uint(own[0].amount), static_cast<uint32_t>(own[0].token),
                        __float_as_uint(own[1].amount), static_cast<uint32_t>(own[1].token)});
  ptx::barrier_sync(kItemBarrier, kAttendThreads);
  const uint4 words = ptx::load_shared_16(a.weights + (1 - kGroup) * kStepBytes);
  const Loss others[2] = {{__uint_as_float(words.x), static_cast<int32_t>(words.y)},
                          {__uint_as_float(words.z), static_cast<int32_t>(words.w)}};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    losses[e].insert(own[e]);
    losses[e].insert(others[e]);
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
      Losses received;
#pragma unroll
      for (int i = 0; i < kRestored; ++i) {
        received.at[i] = {__shfl_xor_sync(0xFFFFFFFF, losses[e].at[i].amount, distance),
                          __shfl_xor_sync(0xFFFFFFFF, losses[e].at[i].token, distance)};
      }
#pragma unroll
      for (const Loss& each : received.at) losses[e].insert(each);
    }
  }
}

// The values of no token.
__device__ const uint4 kZeros[kLatent * 2 / sizeof(uint4)] = {};

// Of tokens, in the cache's 16 bits; of none, and of one that may not be read, zeros. Each of the four lanes that
// differ in t looks one token up.
template <class Element, int kCount>
__device__ __forceinline__ void find_values(const DecodeParams& p, const Attention& a, const Tile& tile,
                                            const int32_t (&tokens)[kCount], const Element* (&values)[kCount]) {
  static_assert(kCount <= 4);
  const int t = a.lane % 4;
  int32_t token = -1;
#pragma unroll
  for (int i = 0; i < kCount; ++i) token = t == i ? tokens[i] : token;
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  const int32_t slot = token < 0 || layer < 0 || layer >= p.layers ? -1 : look_up(p, tile, token).slot(p);
  const Element* const first = static_cast<const Element*>(p.cache) + layer * p.pages * p.page_size * kWidth;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int32_t found = __shfl_sync(0xFFFFFFFF, slot, a.lane - t + i);
    values[i] = found < 0 ? reinterpret_cast<const Element*>(kZeros) : first + int64_t{found} * kWidth;
  }
}

// What a lane has of a row of values at once, by 16 bytes.
constexpr int kBatchVectors = 4;
constexpr int kRowBatches = kGroupColumns / 32 / kBatchVectors;
using Batch = uint4[kBatchVectors];

// `values`: this group's columns.
template <class Element>
__device__ __forceinline__ void load_batch(const Element* values, int number, Batch& batch) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kBatchVectors; ++i) {
    batch[i] = *reinterpret_cast<const uint4*>(values + (4 * (number * kBatchVectors + i) + t) * 8);
  }
}

// `factor` times it, to row `e` of the lane's two.
template <class Element>
__device__ __forceinline__ void add_batch(const Batch& batch, int number, int e, float factor, Output& out) {
#pragma unroll
  for (int i = 0; i < kBatchVectors; ++i) {
    uint32_t words[4] = {batch[i].x, batch[i].y, batch[i].z, batch[i].w};
    transpose_over_t(words);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int columns = 4 * (number * kBatchVectors + i) + j;  // eight
      float* const pair = out[columns / kProductGroups] + 4 * (columns % kProductGroups) + 2 * e;
      Vector<Element, 2> values;
      memcpy(&values, &words[j], sizeof(values));
      pair[0] = fmaf(factor, to_float(values.at[0]), pair[0]);
      pair[1] = fmaf(factor, to_float(values.at[1]), pair[1]);
    }
  }
}

// By both groups, each for its columns. A token with a finite score has finite values: an infinite one would make the
// score infinite or NaN, and then the row is NaN already.
template <class Element, int kGroup>
__device__ __forceinline__ void restore_weights(const DecodeParams& p, const Attention& a, const Tile& tile,
                                                const Rows& rows, Output& out) {
  constexpr int kTokens = 2 * kRestored;  // in turn of the upper and the lower row
  Losses losses[2];
  find_losses<Element, kGroup>(a, rows, losses);
  int32_t tokens[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    tokens[i] = a.row + i % 2 * 8 < tile.rows ? losses[i % 2].at[i / 2].token : -1;
  }
  const Element* values[kTokens];
  find_values(p, a, tile, tokens, values);
#pragma unroll
  for (const Element*& each : values) {
    each += kGroup * kGroupColumns;
    ptx::prefetch_line(each + a.lane % 4 * (kLineBytes / 2));
  }
  // While one batch is added, the next is on its way.
  constexpr int kBatches = kTokens * kRowBatches, kAhead = 2;
  Batch batches[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load_batch(values[i / kRowBatches], i % kRowBatches, batches[i]);
#pragma unroll
  for (int i = 0; i < kBatches; ++i) {
    const int which = i / kRowBatches, next = i + kAhead;
    add_batch<Element>(batches[i % kAhead], i % kRowBatches, which % 2, losses[which % 2].at[which / 2].amount, out);
    if (next < kBatches) load_batch(values[next / kRowBatches], next % kRowBatches, batches[i % kAhead]);
  }
}

}  // namespace mla::sm90::wide
