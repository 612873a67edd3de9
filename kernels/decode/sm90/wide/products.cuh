// The products of wide tiles: S = Q K^T of a block by one group, O += P V with half of the columns by each.
#pragma once

#include "kernels/cuda/wgmma.cuh"
#include "kernels/cuda/wgmma_registers.cuh"
#include "kernels/decode/sm90/wide/weights.cuh"

namespace mla::sm90::wide {

// How keys come from pages: in the order in which their places become free.
struct PagedKeys {
  __host__ __device__ static constexpr uint32_t chunk_in_order(uint32_t i) { return wide::chunk_in_order(i); }
};

// What a warp of a group works with, and where the blocks of an item are.
struct Attention {
  Control& control;
  uint32_t blocks, queries;  // in shared memory
  uint32_t full, empty;      // barriers
  uint32_t weights;          // this thread's, that the groups exchange
  int warp, lane;            // in the group, and in the warp
  int row;                   // the upper of the lane's two
  float scale;

  __device__ __forceinline__ uint32_t block(const Place& place) const { return blocks + place.buffer * kBlockBytes; }

  // By a warp: it has read the chunk. Whoever fills the place has to know.
  __device__ __forceinline__ void give_chunk_back(const Place& place, int chunk) const {
    ptx::mbarrier_arrive_warp(empty + place.slot(chunk) * 8);
  }
};

// A block's products with the queries, chunk by chunk as they arrive. Returns its valid slices, which are
// the loader's again with the place of the rope keys.
template <class Element, class Feed, class Params>
__device__ __forceinline__ uint32_t score_block(const Params& p, const Attention& a, const Place& place,
                                                Scores& score) {
  const uint32_t block = a.block(place), full = a.full + place.slot(0) * 8;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int c = Feed::chunk_in_order(i);
    ptx::mbarrier_wait(full + c * 8, place.parity);
    order_arrived_keys(p);
    // Behind the wait, a loop: operands do not stay in uniform registers across one.
    const uint32_t keys = ptx::matrix_operand(block + c * kChunkBytes);
    const uint32_t queries = ptx::matrix_operand(a.queries + c * Shape::kQueryChunkBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kChunkColumns / 16; ++k) {
      ptx::wgmma<Element, /*kTransposed=*/false>(score, queries + k * 2, keys + k * 2, (i | k) != 0);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  const uint32_t valid_slices = a.control.valid_slices[place.buffer];
  a.give_chunk_back(place, kRopeChunk);
  return valid_slices;
}

// The part of a block in the output: all of its weights, this group's columns of its values. `weights` has to stay
// until the chunks are given back.
template <class Element, int kGroup>
__device__ __forceinline__ void accumulate(const Attention& a, const Place& place, const Weights& weights,
                                           Output& out) {
  const uint32_t values = ptx::wide_operand<kChunkBytes>(a.block(place) + kGroup * kGroupChunks * kChunkBytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kGroupProducts; ++i) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      ptx::wgmma_registers<Element, /*kTransposed=*/true>(
          out[i], weights[k], values + (i * kProductChunks * kChunkBytes + k * kStepTokens * kLineBytes) / 16, true);
    }
    ptx::wgmma_commit();
  }
}

// Waits for these products, and gives the chunks' places back as they end.
template <int kGroup>
__device__ __forceinline__ void give_back(const Attention& a, const Place& place) {
  static_assert(kGroupProducts == 2);
  constexpr int kFirst = kGroup * kGroupChunks;
  ptx::wgmma_wait<1>();
  for (int c = 0; c < kProductChunks; ++c) a.give_chunk_back(place, kFirst + c);
  ptx::wgmma_wait<0>();
  for (int c = kProductChunks; c < kGroupChunks; ++c) a.give_chunk_back(place, kFirst + c);
}

}  // namespace mla::sm90::wide
