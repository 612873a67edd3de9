// What the groups of wide tiles exchange: the weights of each block, by the group that has its scores, and with them
// the references that they are relative to.
#pragma once

#include "kernels/decode/sm90/wide/clear.cuh"
#include "kernels/decode/sm90/wide/products.cuh"

namespace mla::sm90::wide {

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

// --- Where references follow every maximum, they go ahead of the weights, so that the other group rescales its output
// while this one weighs.

// The references after this group's block, to the warp of the other group with the same rows. `highest`: of this lane's
// tokens; then the references.
template <int kGroup>
__device__ __forceinline__ void send_references(const Attention& a, const Rows& rows, float (&highest)[2]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    highest[e] = fmaxf(combine_over_t(highest[e], fmaxf), rows.reference[e]);
    if (a.lane % 4 == 0) a.control.references[a.row + 8 * e] = highest[e];
  }
  ptx::mbarrier_arrive_warp(ptx::shared_address(&a.control.references_full[kGroup][a.warp]));
}

// Those after the other group's block. By `factors` what was summed before has to be multiplied.
template <int kGroup>
__device__ __forceinline__ void receive_references(const Attention& a, uint32_t& parity, Rows& rows,
                                                   float (&factors)[2]) {
  ptx::mbarrier_wait(ptx::shared_address(&a.control.references_full[1 - kGroup][a.warp]), parity);
  parity ^= 1;
  const float next[2] = {a.control.references[a.row], a.control.references[a.row + 8]};
  move_references(next, rows, factors);
}

// What was summed before, if it has to be.
__device__ __forceinline__ void rescale_if_moved(const float (&factors)[2], Output& out) {
  if (__any_sync(0xFFFFFFFF, factors[0] != 1 || factors[1] != 1)) rescale_output(factors, out);
}

// Of a block that the other group has weighed.
template <int kGroup>
__device__ __forceinline__ void await_weights(const Attention& a, Weights& weights) {
  ptx::barrier_sync(kWeightsBarrier + (1 - kGroup) * kGroupWarps + a.warp, 2 * 32);
  read_weights(a.weights, weights);
}

// --- Where they stay until they are outgrown, which is seldom, they go with the weights.

// Of a block that the other group has weighed: its weights, and the references that they are relative to.
template <int kGroup>
__device__ __forceinline__ void receive_weights(const Attention& a, Rows& rows, Weights& weights, Output& out) {
  await_weights<kGroup>(a, weights);
  const float next[2] = {a.control.references[a.row], a.control.references[a.row + 8]};
  if (__any_sync(0xFFFFFFFF, next[0] != rows.reference[0] || next[1] != rows.reference[1])) {
    float factors[2];
    move_references(next, rows, factors);
    rescale_output(factors, out);
  }
}

// Scores become what the exponentials take: masked, and free of a scale that is not positive, under which the largest
// product is not the largest score. Returns what they are still to be multiplied by.
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

// --- Both.

// The weights of a block that this group has scored, for both groups, relative to its references.
template <class Element, int kGroup>
__device__ __forceinline__ void weigh_block(const Attention& a, const Block& block, const Place& place,
                                            const Scores& score, float factor, Rows& rows, Weights& weights) {
  float base[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) base[e] = rows.reference[e] == -INFINITY ? 0 : rows.reference[e];
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
}

// The weights of a block that this group has scored, and the references that they are relative to. True: these have
// moved, and by `factors` what was summed before has to be multiplied.
template <class Element, int kGroup>
__device__ __forceinline__ bool send_weights(float slack, const Attention& a, const Block& block, const Place& place,
                                             const Scores& score, float factor, float (&highest)[2], Rows& rows,
                                             float (&factors)[2], Weights& weights) {
  float next[2];
  const bool moved = next_references(slack, highest, rows, next);
  if (moved) move_references(next, rows, factors);
  __syncwarp();  // all lanes have read those of the block before
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (a.lane % 4 == 0) a.control.references[a.row + 8 * e] = rows.reference[e];
  }
  weigh_block<Element, kGroup>(a, block, place, score, factor, rows, weights);
  return moved;
}

}  // namespace mla::sm90::wide
