// The warps that attend: S = Q K^T and O += P V, with the (query, head) rows on the side of the instruction that is 64
// wide. Two warpgroups take the blocks in turn for their scores, and each has half of the columns of the output for all
// blocks. Two blocks are a round:
//
//   group 0: scores of n; weights of n; output of n;                                  output of n + 1
//   group 1: scores of n + 1;           output of n, and meanwhile weights of n + 1;  output of n + 1
//
// Lane 4 * g + t of a group's warp w has rows 16w + g and 16w + g + 8; of the i-th 128 of its group's columns 8j + 2t
// and 8j + 2t + 1, in out[i][4j], out[i][4j + 1] for the upper row and out[i][4j + 2], out[i][4j + 3] for the lower
// one.
#pragma once

#include "kernels/decode/sm90/wide/exchange.cuh"
#include "kernels/decode/sm90/wide/finish.cuh"
#include "kernels/decode/sm90/wide/products.cuh"

namespace mla::sm90::wide {

template <class Element, int kGroup, class Feed, class Params>
__device__ __forceinline__ void attend_group(const Params& p, const Attention& a) {
  constexpr bool kFollows = kFollowsMaxima<Params>;
  uint32_t first = 0;  // the number of the round's first block in the part
  [[maybe_unused]] uint32_t references_parity = 0;
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
      uint32_t valid_slices = 0;
      if (kGroup == 0 || pair) valid_slices = score_block<Element, Feed>(p, a, places[kGroup], score);
      if (number + kGroups >= blocks) ptx::mbarrier_arrive_warp(ptx::shared_address(&a.control.query_empty));
      if (kGroup == 0 || pair) {
        factor = prepare_scores(a, block, valid_slices, score);
        highest_scores(score, factor, highest);
      }
      if constexpr (kFollows && kGroup == 0) {
        send_references<kGroup>(a, rows, highest);
        move_references(highest, rows, factors);
        rescale_if_moved(factors, out);
        weigh_block<Element, kGroup>(a, block, places[0], score, factor, rows, weights[0]);
        accumulate<Element, kGroup>(a, places[0], weights[0], out);
        if (pair) receive_references<kGroup>(a, references_parity, rows, factors);
        give_back<kGroup>(a, places[0]);
        if (pair) {
          rescale_if_moved(factors, out);
          await_weights<kGroup>(a, weights[1]);
          accumulate<Element, kGroup>(a, places[1], weights[1], out);
          give_back<kGroup>(a, places[1]);
        }
      } else if constexpr (kFollows) {
        receive_references<kGroup>(a, references_parity, rows, factors);
        rescale_if_moved(factors, out);
        await_weights<kGroup>(a, weights[0]);
        accumulate<Element, kGroup>(a, places[0], weights[0], out);
        if (pair) {
          send_references<kGroup>(a, rows, highest);
          move_references(highest, rows, factors);
          weigh_block<Element, kGroup>(a, block, places[1], score, factor, rows, weights[1]);
        }
        give_back<kGroup>(a, places[0]);
        if (pair) {
          rescale_if_moved(factors, out);
          accumulate<Element, kGroup>(a, places[1], weights[1], out);
          give_back<kGroup>(a, places[1]);
        }
      } else if constexpr (kGroup == 0) {
        if (send_weights<Element, kGroup>(p, a, block, places[0], score, factor, highest, rows, factors, weights[0])) {
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
        receive_weights<kGroup>(a, rows, weights[0], out);
        accumulate<Element, kGroup>(a, places[0], weights[0], out);
        bool moved = false;
        if (pair) {
          moved =
              send_weights<Element, kGroup>(p, a, block, places[1], score, factor, highest, rows, factors, weights[1]);
        }
        give_back<kGroup>(a, places[0]);
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

template <class Element, class Feed = PagedKeys, class Params>
__device__ __forceinline__ void attend_tiles(const Params& p, uint32_t blocks, uint32_t queries, Control& control) {
  const int lane = threadIdx.x % 32, thread = threadIdx.x % kGroupThreads;
  const int warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0);
  const Attention a{control,
                    blocks,
                    queries,
                    ptx::shared_address(control.full),
                    ptx::shared_address(control.empty),
                    ptx::shared_address(&control.weights[0][thread]),
                    warp,
                    lane,
                    warp * 16 + lane / 4,
                    p.scale * kLog2E};
  if (__shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / kGroupThreads, 0) == 0) {
    attend_group<Element, 0, Feed>(p, a);
  } else {
    attend_group<Element, 1, Feed>(p, a);
  }
}

}  // namespace mla::sm90::wide
