// The warps that attend: S = Q K^T and O += P V, with the (query, head) rows on the side of the instruction that is 64
// wide. Two warpgroups work on two blocks at a time, a round. Each has the scores of one of them, and half of the
// columns of the output for both.
//
// Lane 4 * g + t of a group's warp w has rows 16w + g and 16w + g + 8; of the output columns 8j + 2t and 8j + 2t + 1 of
// its group's half, in out[4j], out[4j + 1] for the upper row and out[4j + 2], out[4j + 3] for the lower one.
#pragma once

#include "kernels/cuda/wgmma.cuh"
#include "kernels/cuda/wgmma_wide.cuh"
#include "kernels/decode/sm90/wide/clear.cuh"
#include "kernels/decode/sm90/wide/finish.cuh"
#include "kernels/decode/sm90/wide/weights.cuh"

namespace mla::sm90::wide {

// A block's products with the queries, when all of it has arrived.
template <class Element, class Params>
__device__ __forceinline__ void score_block(const Params& p, uint32_t block, uint32_t queries, uint32_t full,
                                            uint32_t parity, Scores& score) {
#pragma unroll
  for (int i = 0; i < kBlockSlots; ++i) ptx::mbarrier_wait(full + i * 8, parity);
  order_arrived_keys(p);
  const uint32_t keys = ptx::matrix_operand(block);
  ptx::wgmma_fence();
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int k = 0; k < kChunkColumns / 16; ++k) {
      ptx::wgmma<Element, /*kTransposed=*/false, kSliceBytes>(
          score, queries + (c * Shape::kQueryChunkBytes + k * 32) / 16, keys + (c * kSliceChunkBytes + k * 32) / 16,
          (c | k) != 0);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
}

// The part of one block, or of two, in the output: all of its weights, this group's columns of its values. A slot is
// given back as soon as its tokens are read.
template <class Element, int kBlockCount>
__device__ __forceinline__ void accumulate(const uint32_t (&values)[kBlocks], const uint32_t (&empty)[kBlocks],
                                           const Weights (&weights)[kBlocks], Output& out) {
  constexpr int kProducts = kBlockCount * kBlockSlots;
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const int block = i / kBlockSlots, k = i % kBlockSlots;
    ptx::wgmma_wide<Element, kSliceBytes>(out, weights[block][k], values[block] + k * kSlotBytes / 16);
    ptx::wgmma_commit();
  }
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    // As many are still running as come after this one.
    switch (kProducts - 1 - i) {
      case 7: ptx::wgmma_wait<7>(); break;
      case 6: ptx::wgmma_wait<6>(); break;
      case 5: ptx::wgmma_wait<5>(); break;
      case 4: ptx::wgmma_wait<4>(); break;
      case 3: ptx::wgmma_wait<3>(); break;
      case 2: ptx::wgmma_wait<2>(); break;
      case 1: ptx::wgmma_wait<1>(); break;
      default: ptx::wgmma_wait<0>();
    }
    ptx::mbarrier_arrive_warp(empty[i / kBlockSlots] + i % kBlockSlots * 8);
  }
}

// Some row of this warp has a new reference, from one of the blocks or from both: the higher holds. `corrections`: what
// the blocks' weights are multiplied by.
__device__ __forceinline__ void agree(const Round& round, int group, int warp, int row, Rows& rows, Output& out,
                                      float (&corrections)[kGroups][2]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float proposed[kGroups];
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      proposed[i] = round.moved[i][warp] ? round.references[i][row + 8 * e] : rows.reference[e];
    }
    const float agreed = fmaxf(proposed[0], proposed[1]);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) corrections[i][e] = reference_factor(proposed[i], agreed);
    rows.sum[e] *= group == 0 ? corrections[0][e] : corrections[1][e];
    const float factor = reference_factor(rows.reference[e], agreed);
    rows.reference[e] = agreed;
#pragma unroll
    for (int j = 0; j < kGroupColumns / 8; ++j) {
      out[4 * j + 2 * e] *= factor;
      out[4 * j + 2 * e + 1] *= factor;
    }
  }
}

template <class Element, class Params>
__device__ __forceinline__ void attend_tiles(const Params& p, uint32_t blocks_address, uint32_t queries_address,
                                             Control& control) {
  const int lane = threadIdx.x % 32, thread = threadIdx.x % kGroupThreads;
  const int warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0);
  const int group = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  const int row = warp * 16 + lane / 4;
  const uint32_t full = ptx::shared_address(control.full), empty = ptx::shared_address(control.empty);
  const uint32_t queries = ptx::matrix_operand(queries_address);
  const float scale = p.scale * kLog2E;
  uint32_t first = 0;  // the number of the round's first block in the part
  uint32_t round_parity = 0;

  for (uint32_t item_parity = 0;; item_parity ^= 1) {
    ptx::mbarrier_wait(ptx::shared_address(&control.query_full), item_parity);
    const Tile& tile = control.queries[item_parity].tile;  // stays there until this item is finished
    if (tile.rows == 0) break;
    const int32_t* visible_end = control.queries[item_parity].visible_end;
    // Blocks of which all rows see all tokens: the first row belongs to the first query.
    const int32_t whole_blocks = (visible_end[0] - tile.kv_begin) / kBlockTokens;
    const int32_t blocks = block_count(tile);
    Rows rows;
    Output out = {};

    for (int32_t block = 0; block < blocks; block += kBlocks) {
      const int32_t own = block + group;
      const bool has_block = own < blocks;
      const bool last_round = block + kBlocks >= blocks;
      const Place place(first + group);
      const uint32_t own_block = blocks_address + place.buffer * kBlockBytes;
      Round& round = control.rounds[round_parity];
      Scores score;
      if (has_block) {
        score_block<Element>(p, own_block, queries, full + place.slot(0) * 8, place.parity, score);
      }
      if (last_round) ptx::mbarrier_arrive_warp(ptx::shared_address(&control.query_empty));
      bool moved = false;
      if (has_block) {
        float factor = scale;
        if (scale <= 0) {  // then the largest product is not the largest score, and a masked one has no sign
#pragma unroll
          for (int i = 0; i < kBlockTokens / 2; ++i) score[i] *= scale;
          factor = 1;
        }
        const uint32_t valid_slices = control.valid_slices[place.buffer];
        if (valid_slices != kAllSlices || own >= whole_blocks) {
          const int32_t first_token = tile.kv_begin + own * kBlockTokens;
          mask_scores({visible_end[row] - first_token, visible_end[row + 8] - first_token}, valid_slices, score);
        }
        float proposed[2];
        moved = propose_references(score, factor, rows, proposed);
        if (moved && lane % 4 == 0) {
#pragma unroll
          for (int e = 0; e < 2; ++e) round.references[group][row + 8 * e] = proposed[e];
        }
        // All of the group have read the keys, so that weights may replace them.
        ptx::barrier_sync(kGroupBarrier + group, kGroupThreads);
        write_weights<Element>(score, factor, proposed, weights_address(own_block, thread), rows);
        if (own >= whole_blocks) {
          const int32_t first_token = tile.kv_begin + own * kBlockTokens;
          clear_values<Element>(own_block, visible_end[0] - first_token, tile.kv_end - first_token);
          ptx::fence_async_proxy();
        }
      }
      if (lane == 0) round.moved[group][warp] = moved;
      ptx::barrier_sync(kItemBarrier, kAttendThreads);  // the weights of both blocks are there

      const bool agreement = round.moved[0][warp] | round.moved[1][warp];
      float corrections[kGroups][2];
      if (agreement) agree(round, group, warp, row, rows, out, corrections);
      const bool pair = block + 1 < blocks;
      const Place places[kBlocks] = {Place(first), Place(first + 1)};
      uint32_t values[kBlocks], slots_empty[kBlocks];
      Weights weights[kBlocks] = {};
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const uint32_t address = blocks_address + places[i].buffer * kBlockBytes;
        if (i == 0 || pair) read_weights(weights_address(address, thread), weights[i]);
        if (agreement) scale_weights<Element>(corrections[i], weights[i]);
        values[i] = ptx::wide_operand<kSliceChunkBytes>(address + group * (kLatentChunks / kGroups) * kSliceChunkBytes);
        slots_empty[i] = empty + places[i].slot(0) * 8;
      }
      if (pair) {
        accumulate<Element, 2>(values, slots_empty, weights, out);
      } else {
        accumulate<Element, 1>(values, slots_empty, weights, out);
      }
      first += pair ? 2 : 1;
      round_parity ^= 1;
    }
    finish_tile<Element>(p, tile, group, row, rows, out, control);
  }
}

}  // namespace mla::sm90::wide
