// The warps that attend: S = Q K^T and O += P V, with the (query, head) rows on the side of the instruction that is 64
// wide. Two warpgroups take the blocks in turn for their scores, and each has half of the columns of the output for all
// blocks. Two blocks are a round:
//
//   group 0: scores of n; weights of n; output of n;                                  output of n + 1
//   group 1: scores of n + 1;           output of n, and meanwhile weights of n + 1;  output of n + 1
//
// Where keys come slowly, group 1 takes the output of n before the scores of n + 1, so that the place of n does not
// wait for the keys of n + 1.
//
// Lane 4 * g + t of a group's warp w has rows 16w + g and 16w + g + 8; of the i-th 128 of its group's columns 8j + 2t
// and 8j + 2t + 1, in out[i][4j], out[i][4j + 1] for the upper row and out[i][4j + 2], out[i][4j + 3] for the lower
// one.
#pragma once

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/cuda/wgmma_registers.cuh"
#include "kernels/decode/sm90/wide/clear.cuh"
#include "kernels/decode/sm90/wide/finish.cuh"
#include "kernels/decode/sm90/wide/weights.cuh"

namespace mla::sm90::wide {

// How keys come.
struct OwnKeys {
  static constexpr bool kScoresFirst = true;
  static constexpr int kCtas = 1;  // that bring keys for each other, of a cluster
};

// What a warp of a group works with, and where the blocks of an item are.
template <class Feed>
struct Attention {
  Control& control;
  uint32_t blocks, queries;  // in shared memory
  uint32_t full, empty;      // barriers
  uint32_t peer_empty;       // of the cluster's other CTA
  uint32_t weights;          // this thread's, that the groups exchange
  int warp, lane;            // in the group, and in the warp
  int row;                   // the upper of the lane's two
  float scale;

  __device__ __forceinline__ uint32_t block(const Place& place) const { return blocks + place.buffer * kBlockBytes; }

  // By a warp: it has read the chunk. Whoever fills the place has to know.
  __device__ __forceinline__ void give_chunk_back(const Place& place, int chunk) const {
    const uint32_t offset = place.slot(chunk) * 8;
    ptx::mbarrier_arrive_warp(empty + offset);
    if constexpr (Feed::kCtas > 1) {
      if (ptx::kWarpArrivals > 1 || lane == 0) ptx::mbarrier_arrive_remote(peer_empty + offset);
    }
  }
};

// What hides tokens of a block.
struct Block {
  const int32_t* visible_end;  // of all rows
  int32_t first_token;
  int32_t seen_by_all, tokens;  // of it: by all rows, since the first one belongs to the first query; and in the item
  bool whole;                   // all rows see all tokens

  __device__ __forceinline__ Block(const Tile& tile, const int32_t* visible_end, int32_t number)
      : visible_end(visible_end),
        first_token(tile.kv_begin + number * kBlockTokens),
        seen_by_all(visible_end[0] - first_token),
        tokens(tile.kv_end - first_token),
        whole(seen_by_all >= kBlockTokens) {}
};

// A block's products with the queries, chunk by chunk as they arrive. Returns its valid slices, which are
// the loader's again with the place of the rope keys.
template <class Element, class Params, class Attention>
__device__ __forceinline__ uint32_t score_block(const Params& p, const Attention& a, const Place& place,
                                                Scores& score) {
  const uint32_t block = a.block(place), full = a.full + place.slot(0) * 8;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int c = chunk_in_order(i);
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
template <class Element, int kGroup, class Attention>
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
template <int kGroup, class Attention>
__device__ __forceinline__ void give_back(const Attention& a, const Place& place) {
  static_assert(kGroupProducts == 2);
  constexpr int kFirst = kGroup * kGroupChunks;
  ptx::wgmma_wait<1>();
  for (int c = 0; c < kProductChunks; ++c) a.give_chunk_back(place, kFirst + c);
  ptx::wgmma_wait<0>();
  for (int c = kProductChunks; c < kGroupChunks; ++c) a.give_chunk_back(place, kFirst + c);
}

// Of a block that the other group has weighed: its weights, and the references that they are relative to.
template <int kGroup, class Attention>
__device__ __forceinline__ void receive_weights(const Attention& a, Rows& rows, Weights& weights, Output& out) {
  ptx::barrier_sync(kWeightsBarrier + (1 - kGroup) * kGroupWarps + a.warp, 2 * 32);
  read_weights(a.weights, weights);
  const float next[2] = {a.control.references[a.row], a.control.references[a.row + 8]};
  if (__any_sync(0xFFFFFFFF, next[0] != rows.reference[0] || next[1] != rows.reference[1])) {
    float factors[2];
    move_references(next, rows, factors);
    rescale_output(factors, out);
  }
}

// Scores become what the exponentials take: masked, and free of a scale that is not positive, under which the largest
// product is not the largest score. Returns what they are still to be multiplied by.
template <class Attention>
__device__ __forceinline__ float prepare_scores(const Attention& a, const Block& block, uint32_t valid_slices,
                                                Scores& score) {
  float factor = a.scale;
  if (factor <= 0) {
#pragma unroll
    for (int i = 0; i < kBlockTokens / 2; ++i) score[i] *= a.scale;
    factor = 1;
  }
  if (valid_slices != kAllSlices || !block.whole) {
    mask_scores({block.visible_end[a.row] - block.first_token, block.visible_end[a.row + 8] - block.first_token},
                valid_slices, score);
  }
  return factor;
}

// The weights of a block that this group has scored, and the references that they are relative to, for both groups.
// True: these have moved, and by `factors` what was summed before has to be multiplied.
template <class Element, int kGroup, class Attention>
__device__ __forceinline__ bool send_weights(const Attention& a, const Block& block, const Place& place,
                                             const Scores& score, float factor, float (&highest)[2], Rows& rows,
                                             float (&factors)[2], Weights& weights) {
  float next[2];
  const bool moved = next_references(highest, rows, next);
  if (moved) move_references(next, rows, factors);
  float base[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (a.lane % 4 == 0) a.control.references[a.row + 8 * e] = rows.reference[e];
    base[e] = rows.reference[e] == -INFINITY ? 0 : rows.reference[e];
  }
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    weigh<Element>(score, k, factor, base, rows, weights[k]);
    ptx::store_shared_16(a.weights + k * kStepBytes, {weights[k][0], weights[k][1], weights[k][2], weights[k][3]});
  }
  if (!block.whole) {
    ptx::barrier_sync(kGroupBarrier + kGroup, kGroupThreads);  // all of the group have read the keys
    clear_values<Element>(a.block(place), block.seen_by_all, block.tokens);
    ptx::fence_async_proxy();
    ptx::barrier_sync(kGroupBarrier + kGroup, kGroupThreads);
  }
  ptx::barrier_arrive(kWeightsBarrier + kGroup * kGroupWarps + a.warp, 2 * 32);
  return moved;
}

template <class Element, int kGroup, class Params, class Feed>
__device__ __forceinline__ void attend_group(const Params& p, const Attention<Feed>& a) {
  uint32_t first = 0;  // the number of the round's first block in the part
  for (uint32_t item_parity = 0;; item_parity ^= 1) {
    ptx::mbarrier_wait(ptx::shared_address(&a.control.query_full), item_parity);
    const Tile& tile = a.control.queries[item_parity].tile;  // stays there until this item is finished
    // Through a shuffle the compiler knows that a number is uniform, and so that descriptors may stay in uniform
    // registers.
    const int32_t blocks = __shfl_sync(0xFFFFFFFF, tile.rows == 0 ? 0 : block_count(tile), 0);
    if (blocks == 0) break;
    const int32_t* visible_end = a.control.queries[item_parity].visible_end;
    Rows rows;
    Output out = {};

    for (int32_t number = 0; number < blocks; number += kGroups) {
      const bool pair = number + 1 < blocks;
      const Place places[kGroups] = {Place(first), Place(first + 1)};
      const Block block(tile, visible_end, number + kGroup);
      Scores score;
      Weights weights[kGroups];
      float factor = 0, highest[2], factors[2];
      if constexpr (kGroup == 1 && !Feed::kScoresFirst) {
        receive_weights<kGroup>(a, rows, weights[0], out);
        accumulate<Element, kGroup>(a, places[0], weights[0], out);
        give_back<kGroup>(a, places[0]);
      }
      uint32_t valid_slices = 0;
      if (kGroup == 0 || pair) valid_slices = score_block<Element>(p, a, places[kGroup], score);
      if (number + kGroups >= blocks) ptx::mbarrier_arrive_warp(ptx::shared_address(&a.control.query_empty));
      if (kGroup == 0 || pair) {
        factor = prepare_scores(a, block, valid_slices, score);
        highest_scores(score, factor, highest);
      }
      if constexpr (kGroup == 0) {
        if (send_weights<Element, kGroup>(a, block, places[0], score, factor, highest, rows, factors, weights[0])) {
          rescale_output(factors, out);
        }
        accumulate<Element, kGroup>(a, places[0], weights[0], out);
        give_back<kGroup>(a, places[0]);
        if (pair) {
          receive_weights<kGroup>(a, rows, weights[1], out);
          accumulate<Element, kGroup>(a, places[1], weights[1], out);
          give_back<kGroup>(a, places[1]);
        }
      } else {
        if constexpr (Feed::kScoresFirst) {
          receive_weights<kGroup>(a, rows, weights[0], out);
          accumulate<Element, kGroup>(a, places[0], weights[0], out);
        }
        bool moved = false;
        if (pair) {
          moved = send_weights<Element, kGroup>(a, block, places[1], score, factor, highest, rows, factors, weights[1]);
        }
        if constexpr (Feed::kScoresFirst) give_back<kGroup>(a, places[0]);
        if (pair) {
          if (moved) rescale_output(factors, out);
          accumulate<Element, kGroup>(a, places[1], weights[1], out);
          give_back<kGroup>(a, places[1]);
        }
      }
      first += pair ? 2 : 1;
    }
    finish_tile<Element>(p, tile, kGroup, a.row, rows, out, a.control);
  }
}

template <class Element, class Feed = OwnKeys, class Params>
__device__ __forceinline__ void attend_tiles(const Params& p, uint32_t blocks, uint32_t queries, Control& control) {
  const int lane = threadIdx.x % 32, thread = threadIdx.x % kGroupThreads;
  const int warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0);
  const uint32_t empty = ptx::shared_address(control.empty);
  const Attention<Feed> a{control,
                          blocks,
                          queries,
                          ptx::shared_address(control.full),
                          empty,
                          Feed::kCtas > 1 ? ptx::remote_address(empty, blockIdx.x % Feed::kCtas ^ 1) : 0,
                          ptx::shared_address(&control.weights[0][thread]),
                          warp,
                          lane,
                          warp * 16 + lane / 4,
                          p.scale * kLog2E};
  if (__shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / kGroupThreads, 0) == 0) {
    attend_group<Element, 0>(p, a);
  } else {
    attend_group<Element, 1>(p, a);
  }
}

}  // namespace mla::sm90::wide
