// The warps that attend: S = Q K^T and O += P V, with the (query, head) rows on the side of the instruction that is 64
// wide. Two warpgroups take the blocks in turn for their scores, and each has half of the columns of the output for all
// blocks. Two blocks are a round:
//
//   group 0: scores of n; weights of n;                          output of n;     output of n + 1
//   group 1: scores of n + 1; output of n, and meanwhile weights of n + 1;        output of n + 1
//
// Lane 4 * g + t of a group's warp w has rows 16w + g and 16w + g + 8; of chunk c of its group's columns 8j + 2t and 8j
// + 2t + 1, in out[c][4j], out[c][4j + 1] for the upper row and out[c][4j + 2], out[c][4j + 3] for the lower one.
#pragma once

#include "kernels/cuda/wgmma.cuh"
#include "kernels/cuda/wgmma_registers.cuh"
#include "kernels/decode/sm90/wide/clear.cuh"
#include "kernels/decode/sm90/wide/finish.cuh"
#include "kernels/decode/sm90/wide/weights.cuh"

namespace mla::sm90::wide {

// What a warp of a group works with, and where the blocks of an item are.
struct Attention {
  Control& control;
  uint32_t blocks, queries;  // in shared memory; the queries as an operand
  uint32_t full, empty;      // barriers
  int thread, warp, lane;    // in the group, and in the warp
  int row;                   // the upper of the lane's two
  float scale;

  __device__ __forceinline__ uint32_t block(const Place& place) const { return blocks + place.buffer * kBlockBytes; }
};

// A block's products with the queries, chunk by chunk as they arrive.
template <class Element, class Params>
__device__ __forceinline__ void score_block(const Params& p, const Attention& a, const Place& place, Scores& score) {
  const uint32_t keys = ptx::matrix_operand(a.block(place)), full = a.full + place.slot(0) * 8;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int c = chunk_in_order(i);
    ptx::mbarrier_wait(full + c * 8, place.parity);
    order_arrived_keys(p);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kChunkColumns / 16; ++k) {
      ptx::wgmma<Element, /*kTransposed=*/false>(score, a.queries + (c * Shape::kQueryChunkBytes + k * 32) / 16,
                                                 keys + (c * kChunkBytes + k * 32) / 16, (i | k) != 0);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
}

// The part of a block in the output: all of its weights, this group's columns of its values. `weights` has to stay
// until the chunks are given back.
template <class Element, int kGroup>
__device__ __forceinline__ void accumulate(const Attention& a, const Place& place, const Weights& weights,
                                           Output& out) {
  const uint32_t values = ptx::matrix_operand(a.block(place) + kGroup * kGroupChunks * kChunkBytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int c = 0; c < kGroupChunks; ++c) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      ptx::wgmma_registers<Element, /*kTransposed=*/true>(out[c], weights[k],
                                                          values + (c * kChunkBytes + k * 16 * kLineBytes) / 16, true);
    }
    ptx::wgmma_commit();
  }
}

// Waits for the products with chunk `c` of the group's, the last that were asked for, and gives its place back.
template <int kGroup, int c>
__device__ __forceinline__ void give_back(const Attention& a, const Place& place) {
  ptx::wgmma_wait<kGroupChunks - 1 - c>();
  ptx::mbarrier_arrive_warp(a.empty + place.slot(kGroup * kGroupChunks + c) * 8);
}

template <int kGroup>
__device__ __forceinline__ void give_back_all(const Attention& a, const Place& place) {
  static_assert(kGroupChunks == 4);
  give_back<kGroup, 0>(a, place);
  give_back<kGroup, 1>(a, place);
  give_back<kGroup, 2>(a, place);
  give_back<kGroup, 3>(a, place);
}

// Of a block that the other group has weighed: its weights, and the references that they are relative to.
template <int kGroup>
__device__ __forceinline__ void receive_weights(const Attention& a, const Place& place, Rows& rows, Weights& weights,
                                                Output& out) {
  ptx::barrier_sync(kWeightsBarrier + 1 - kGroup, kAttendThreads);
  read_weights(weights_address(a.block(place), a.thread), weights);
  const float next[2] = {a.control.references[a.row], a.control.references[a.row + 8]};
  ptx::mbarrier_arrive_warp(a.empty + place.slot(kRopeChunk) * 8);
  if (__any_sync(0xFFFFFFFF, next[0] != rows.reference[0] || next[1] != rows.reference[1])) {
    float factors[2];
    move_references(next, rows, factors);
    rescale_output(factors, out);
  }
}

// Scores become what the exponentials take: masked, and free of a scale that is not positive, under which the largest
// product is not the largest score. Returns what they are still to be multiplied by.
__device__ __forceinline__ float prepare_scores(const Attention& a, const int32_t* visible_end, int32_t first_token,
                                                bool whole, const Place& place, Scores& score) {
  float factor = a.scale;
  if (factor <= 0) {
#pragma unroll
    for (int i = 0; i < kBlockTokens / 2; ++i) score[i] *= a.scale;
    factor = 1;
  }
  const uint32_t valid_slices = a.control.valid_slices[place.buffer];
  if (valid_slices != kAllSlices || !whole) {
    mask_scores({visible_end[a.row] - first_token, visible_end[a.row + 8] - first_token}, valid_slices, score);
  }
  return factor;
}

// The weights of a block that this group has scored, for both groups, and the references that they are relative to.
// `after_step(k)` runs behind the weights of each 16 tokens.
template <class Element, int kGroup, class AfterStep>
__device__ __forceinline__ bool send_weights(const Attention& a, const Tile& tile, const int32_t* visible_end,
                                             int32_t first_token, bool whole, const Place& place, Scores& score,
                                             Rows& rows, float (&factors)[2], Weights& weights, AfterStep after_step) {
  const float factor = prepare_scores(a, visible_end, first_token, whole, place, score);
  float next[2];
  const bool moved = next_references(score, factor, rows, next);
  if (moved) move_references(next, rows, factors);
  if (a.lane % 4 == 0) {
    a.control.references[a.row] = rows.reference[0];
    a.control.references[a.row + 8] = rows.reference[1];
  }
  float base[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) base[e] = rows.reference[e] == -INFINITY ? 0 : rows.reference[e];
  const uint32_t target = weights_address(a.block(place), a.thread);
  ptx::barrier_sync(kGroupBarrier + kGroup, kGroupThreads);  // all of the group have read the rope keys
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    weigh<Element>(score, k, factor, base, rows, weights[k]);
    ptx::store_shared_16(target + k * kStepBytes, {weights[k][0], weights[k][1], weights[k][2], weights[k][3]});
    after_step(k);
  }
  if (!whole) {
    clear_values<Element>(a.block(place), visible_end[0] - first_token, tile.kv_end - first_token);
    ptx::fence_async_proxy();
    ptx::barrier_sync(kGroupBarrier + kGroup, kGroupThreads);
  }
  ptx::barrier_arrive(kWeightsBarrier + kGroup, kAttendThreads);
  return moved;
}

template <class Element, int kGroup, class Params>
__device__ __forceinline__ void attend_group(const Params& p, const Attention& a) {
  uint32_t first = 0;  // the number of the round's first block in the part
  for (uint32_t item_parity = 0;; item_parity ^= 1) {
    ptx::mbarrier_wait(ptx::shared_address(&a.control.query_full), item_parity);
    const Tile& tile = a.control.queries[item_parity].tile;  // stays there until this item is finished
    if (tile.rows == 0) break;
    const int32_t* visible_end = a.control.queries[item_parity].visible_end;
    // Blocks of which all rows see all tokens: the first row belongs to the first query.
    const int32_t whole_blocks = (visible_end[0] - tile.kv_begin) / kBlockTokens;
    const int32_t blocks = block_count(tile);
    Rows rows;
    Output out = {};

    for (int32_t block = 0; block < blocks; block += kGroups) {
      const bool pair = block + 1 < blocks;
      const Place places[kGroups] = {Place(first), Place(first + 1)};
      const int32_t own = block + kGroup, first_token = tile.kv_begin + own * kBlockTokens;
      Scores score;
      Weights weights[kGroups];
      float factors[2];
      if (kGroup == 0 || pair) score_block<Element>(p, a, places[kGroup], score);
      if (block + kGroups >= blocks) ptx::mbarrier_arrive_warp(ptx::shared_address(&a.control.query_empty));
      if constexpr (kGroup == 0) {
        const bool moved = send_weights<Element, kGroup>(a, tile, visible_end, first_token, own < whole_blocks,
                                                         places[0], score, rows, factors, weights[0], [](int) {});
        if (moved) rescale_output(factors, out);
        accumulate<Element, kGroup>(a, places[0], weights[0], out);
        give_back_all<kGroup>(a, places[0]);
        if (pair) {
          receive_weights<kGroup>(a, places[1], rows, weights[1], out);
          accumulate<Element, kGroup>(a, places[1], weights[1], out);
          give_back_all<kGroup>(a, places[1]);
        }
      } else {
        receive_weights<kGroup>(a, places[0], rows, weights[0], out);
        accumulate<Element, kGroup>(a, places[0], weights[0], out);
        if (pair) {
          const bool moved = send_weights<Element, kGroup>(
              a, tile, visible_end, first_token, own < whole_blocks, places[1], score, rows, factors, weights[1],
              [&](int k) {
                switch (k) {
                  case 0: give_back<kGroup, 0>(a, places[0]); break;
                  case 1: give_back<kGroup, 1>(a, places[0]); break;
                  case 2: give_back<kGroup, 2>(a, places[0]); break;
                  default: give_back<kGroup, 3>(a, places[0]);
                }
              });
          if (moved) rescale_output(factors, out);
          accumulate<Element, kGroup>(a, places[1], weights[1], out);
          give_back_all<kGroup>(a, places[1]);
        } else {
          give_back_all<kGroup>(a, places[0]);
        }
      }
      first += pair ? 2 : 1;
    }
    finish_tile<Element>(p, tile, kGroup, a.row, rows, out, a.control.sums[item_parity]);
  }
}

template <class Element, class Params>
__device__ __forceinline__ void attend_tiles(const Params& p, uint32_t blocks, uint32_t queries, Control& control) {
  const int lane = threadIdx.x % 32, thread = threadIdx.x % kGroupThreads;
  const int warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0);
  const Attention a{control,
                    blocks,
                    ptx::matrix_operand(queries),
                    ptx::shared_address(control.full),
                    ptx::shared_address(control.empty),
                    thread,
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
