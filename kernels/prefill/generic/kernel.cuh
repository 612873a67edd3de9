// mla_prefill for any GPU from sm_80 on: attention of up-projected queries and keys over a ragged batch, by mma.sync
// over blocks that cp.async brings.
//
// A CTA has up to 128 queries of one request and head, 16 a warp, which stay in registers as their scores, weights and
// output do: the online softmax of FlashAttention-2 (arXiv 2307.08691). One block of keys and values is worked on while
// the next one comes.
#pragma once

#include <cuda_runtime.h>

#include "kernels/prefill/generic/attend.cuh"
#include "kernels/prefill/generic/loads.cuh"
#include "kernels/prefill/generic/shape.h"

namespace mla::generic_prefill {

template <class Element>
__device__ __forceinline__ void finish_tile(const PrefillParams& p, const Tile& tile, int32_t unusable, int row,
                                            const int32_t (&visible)[2], const Rows& rows, const Output& out) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const bool finite = is_finite_row(out, e);  // asked by the whole warp
    const bool spoiled = !finite || visible[e] > unusable;
    prefill_rows::finish_row<Element>(p, int64_t{tile.first_query + row + 8 * e} * p.heads + tile.head,
                                      row + 8 * e < tile.rows, spoiled, e, rows, out);
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads, 1) prefill_kernel(const __grid_constant__ PrefillParams p) {
  extern __shared__ __align__(1024) unsigned char shared_base[];
  auto& control = *reinterpret_cast<Control*>(shared_base + kControlAt);
  const uint32_t memory = ptx::shared_address(shared_base);
  // Through a shuffle the compiler knows that the warp's number is uniform.
  const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp == 0) {
    const auto head_tiles = static_cast<uint32_t>(most_head_tiles<kTileQueries>(p));
    const uint32_t head = blockIdx.x / head_tiles;
    find_tile(p, static_cast<int32_t>(blockIdx.x - head * head_tiles), control.tile);
    if (threadIdx.x == 0) {
      control.tile.head = static_cast<int32_t>(head);
      control.unusable = kNever;
    }
  }
  __syncthreads();
  const Tile tile = control.tile;
  if (tile.rows == 0) return;

  // Keys that the tile's last row sees, that its first one does, and that this warp's rows do.
  const int32_t keys = visible_keys(tile, p.causal, tile.rows - 1), whole = visible_keys(tile, p.causal, 0);
  const int first_row = warp * kWarpQueries, row = first_row + static_cast<int>(threadIdx.x) % 32 / 4;
  const int last_row = clamp(tile.rows - 1, 0, first_row + kWarpQueries - 1);
  const int32_t warp_keys = first_row < tile.rows ? visible_keys(tile, p.causal, last_row) : 0;
  const int32_t warp_whole = visible_keys(tile, p.causal, first_row);
  const int32_t visible[2] = {visible_keys(tile, p.causal, row), visible_keys(tile, p.causal, row + 8)};
  const float scale = p.scale * kLog2E;

  const BlockLoader loader(p, tile, keys);
  if (keys > 0) loader.load(0, memory);
  ptx::cp_async_commit();
  Queries queries;
  load_queries<Element>(p, tile, row, queries);
  Rows rows;
  Output out = {};
#pragma unroll 1
  for (int32_t first = 0; first < keys; first += kBlockKeys) {
    const int32_t block = first / kBlockKeys;
    const int stage_at = block % kStages * kStageBytes;
    const uint32_t stage = memory + stage_at;
    ptx::cp_async_wait<0>();
    __syncthreads();  // the block is here for everyone, and everyone has done with the one before it
    if (first + kBlockKeys < keys) loader.load(block + 1, memory + (block + 1) % kStages * kStageBytes);
    ptx::cp_async_commit();

    const bool key_mask = p.key_mask != nullptr;
    const KeyBits bits = read_key_bits(p, tile.kv_begin + first);
    if (key_mask || first + kBlockKeys > whole) {
      clear_values<Element>(shared_base + stage_at + kValuesAt, first, bits, control.unusable);
      __syncthreads();
    }
    if (first >= warp_keys) continue;
    Scores score;
    score_block<Element>(queries, stage, score);
    if (key_mask || first + kBlockKeys > warp_whole) {
      scale_scores<true>(scale, {visible[0] - first, visible[1] - first}, bits, score);
    } else {
      scale_scores<false>(scale, visible, bits, score);
    }
    weigh_scores(score, rows, out);
    accumulate_block<Element>(score, stage + kValuesAt, out);
  }
  __syncthreads();
  finish_tile<Element>(p, tile, control.unusable, row, visible, rows, out);
}

}  // namespace mla::generic_prefill
