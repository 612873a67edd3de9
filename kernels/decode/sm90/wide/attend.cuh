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

// Two blocks of an item, or its last one, and of the group's own one the scores.
struct Round {
  Place places[kGroups];
  bool pair;
  Block block;
  Scores score;
  float factor = 0, highest[2];  // prepare_scores, highest_scores

  __device__ __forceinline__ Round(uint32_t first, bool pair, const Block& block)
      : places{Place(first), Place(first + 1)}, pair(pair), block(block) {}
};

// Where references follow every maximum. `parity`: of the other group's references.
template <class Element, int kGroup>
__device__ __forceinline__ void follow(const Attention& a, Round& round, uint32_t& parity, Rows& rows, Output& out) {
  Weights weights[kGroups];
  float factors[2];
  const auto weigh = [&](Weights& own) {
    weigh_block<Element, kGroup>(a, round.block, round.places[kGroup], round.score, round.factor, rows, own);
  };
  if constexpr (kGroup == 0) {
    send_references<kGroup>(a, rows, round.highest);
    move_references(round.highest, rows, factors);
    rescale_if_moved(factors, out);
    weigh(weights[0]);
  } else {
    receive_references<kGroup>(a, parity, rows, factors);
    rescale_if_moved(factors, out);
    await_weights<kGroup>(a, weights[0]);
  }
  accumulate<Element, kGroup>(a, round.places[0], weights[0], out);
  if (round.pair) {
    if constexpr (kGroup == 0) {
      receive_references<kGroup>(a, parity, rows, factors);
    } else {
      send_references<kGroup>(a, rows, round.highest);
      move_references(round.highest, rows, factors);
      weigh(weights[1]);
    }
  }
  give_back<kGroup>(a, round.places[0]);
  if (!round.pair) return;
  rescale_if_moved(factors, out);
  if constexpr (kGroup == 0) await_weights<kGroup>(a, weights[1]);
  accumulate<Element, kGroup>(a, round.places[1], weights[1], out);
  give_back<kGroup>(a, round.places[1]);
}

// Where they stay until they are outgrown.
template <class Element, int kGroup>
__device__ __forceinline__ void stay(float slack, const Attention& a, Round& round, Rows& rows, Output& out) {
  Weights weights[kGroups];
  float factors[2];
  const auto weigh = [&](Weights& own) {
    return send_weights<Element, kGroup>(slack, a, round.block, round.places[kGroup], round.score, round.factor,
                                         round.highest, rows, factors, own);
  };
  bool moved = false;
  if constexpr (kGroup == 0) {
    if (weigh(weights[0])) rescale_output(factors, out);
  } else {
    receive_weights<kGroup>(a, rows, weights[0], out);
  }
  accumulate<Element, kGroup>(a, round.places[0], weights[0], out);
  if (kGroup == 1 && round.pair) moved = weigh(weights[1]);
  give_back<kGroup>(a, round.places[0]);
  if (!round.pair) return;
  if constexpr (kGroup == 0) receive_weights<kGroup>(a, rows, weights[1], out);
  if (moved) rescale_output(factors, out);
  accumulate<Element, kGroup>(a, round.places[1], weights[1], out);
  give_back<kGroup>(a, round.places[1]);
}

template <class Element, int kGroup, class Feed, class Params>
__device__ __forceinline__ void attend_group(const Params& p, const Attention& a) {
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
      Round round(first, number + 1 < blocks, Block(tile, visible_end, number + kGroup));
      const bool own = kGroup == 0 || round.pair;
      uint32_t valid_slices = 0;
      if (own) valid_slices = score_block<Element, Feed>(p, a, round.places[kGroup], round.score);
      if (number + kGroups >= blocks) ptx::mbarrier_arrive_warp(ptx::shared_address(&a.control.query_empty));
      if (own) {
        round.factor = prepare_scores(a, round.block, valid_slices, round.score);
        highest_scores(round.score, round.factor, round.highest);
      }
      if constexpr (kReferenceSlack<Params> == 0) {
        follow<Element, kGroup>(a, round, references_parity, rows, out);
      } else {
        stay<Element, kGroup>(kReferenceSlack<Params>, a, round, rows, out);
      }
      first += round.pair ? 2 : 1;
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
