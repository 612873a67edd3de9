// mla_sparse_decode for any GPU from sm_80 on: the scheme of the generic decode kernel over tokens that are chosen one
// by one.
//
// A CTA has one query token, a tile of its heads and one piece of its indices. Index by index, slots replace the page
// table; one that names no token is zeros in shared memory and -inf among the scores.
#pragma once

#include "kernels/decode/generic/kernel.cuh"
#include "kernels/sparse/work.cuh"

namespace mla::generic_sparse {

template <class Cached, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    sparse_kernel(const __grid_constant__ SparseDecodeParams p, int stages) {
  using Source = Tokens<Cached, Shape>;
  using Element = typename Multiplied<Cached>::Type;
  constexpr int kTokens = Shape::kTokens;
  constexpr bool kDsMla = std::is_same_v<Cached, DsMla>, kFp8 = std::is_same_v<Cached, E4M3FN>;
  extern __shared__ __align__(1024) unsigned char shared_base[];
  auto& shared = *reinterpret_cast<SharedMemory<Shape>*>(shared_base);
  unsigned char* const ring = shared_base + sizeof(shared);
  const uint32_t ring_address = ptx::shared_address(ring);
  const uint32_t weights = ptx::shared_address(shared.weights);
  ptx::launch_dependents();

  const int thread = threadIdx.x;
  const int warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0);
  const int quarter = warp % Shape::kQuarters, group = warp / Shape::kQuarters;
  const int row_group = group % Shape::kRowGroups, token_group = group / Shape::kRowGroups;
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  const bool has_layer = layer >= 0 && layer < p.layers;
  const float value_scale = kFp8 && has_layer ? key_scale(p) : 1.0f;

  const Tile tile = tile_of(p, SparseWork(p, static_cast<int32_t>(blockIdx.x)));
  int32_t remaining = tile.kv_end - tile.kv_begin;  // indices; none if not positive
  if (thread < stages * kTokens) {
    shared.slots[thread / kTokens][thread % kTokens] = slot_at(p, tile, int64_t{tile.kv_begin} + thread);
  }
  if (thread == 0) {
    shared.tile = tile;
    shared.layer = layer_of(p, Source::kTokenBytes);
    shared.scale = p.scale * kLog2E;
    if (kFp8) shared.scale *= value_scale * (p.q_scale == nullptr ? 1.0f : *p.q_scale);
  }
  if (thread < Shape::kRows) shared.visible_end[thread] = INT32_MAX;
  __syncthreads();
  for (int i = 0; i < stages - 1; ++i) {
    if (remaining > i * kTokens) {
      Source::load(shared.layer, ring_address + i * Source::kStageBytes, shared.slots[i]);
    }
    ptx::cp_async_commit();
  }

  Queries<Shape> queries;
  if constexpr (kFp8)
    load_queries_as_halves<Shape>(p, tile, row_group, quarter, /*writes_scale=*/token_group == 0, shared, queries);
  else
    load_queries<Element, Shape>(p, tile, row_group, quarter, queries);
  Softmax<Shape> softmax;
#pragma unroll
  for (int pass = 0; pass < Shape::kSoftmaxPasses; ++pass) {
    softmax.reference[pass] = -INFINITY;
    softmax.sum[pass] = 0;
  }
  Output<Shape> out = {};

  int stage = 0;
  for (; remaining > 0; remaining -= kTokens) {
    wait_for_block(stages);
    __syncthreads();  // the block is here for everyone, and everyone has done with the one before it
    const int free_stage = stage == 0 ? stages - 1 : stage - 1;
    if (remaining > (stages - 1) * kTokens) {
      Source::load(shared.layer, ring_address + free_stage * Source::kStageBytes, shared.slots[free_stage]);
    }
    ptx::cp_async_commit();  // an empty group counts too
    int32_t later = -1;
    if (thread < kTokens) {
      later = index_at(p, shared.tile, int64_t{shared.tile.kv_end} - remaining + stages * kTokens + thread);
    }

    uint32_t block = ring_address + stage * Source::kStageBytes;
    const float* scales = nullptr;
    if constexpr (kDsMla) {
      unsigned char* const unpacked = ring + stages * Source::kStageBytes;
      auto* const unpacked_scales = reinterpret_cast<float*>(unpacked + Shape::kBlockBytes);
      Source::unpack(ring + stage * Source::kStageBytes, unpacked, unpacked_scales);
      block = ptx::shared_address(unpacked);
      scales = unpacked_scales;
      __syncthreads();
    }
    score_block<Element, Shape>(queries, block, shared, row_group, token_group, quarter, scales);
    __syncthreads();
    const bool rescaled = weigh_block<typename Fragments<Element, Shape>::Element, Shape>(
        shared, shared.slots[stage], /*first_token=*/0, shared.scale, softmax);
    if (__syncthreads_or(rescaled)) rescale_output<Shape>(shared.rescale, out);
    if (thread < kTokens) shared.slots[stage][thread] = slot_of(p, later);
    accumulate_block<Element, Shape>(weights, block, out, scales);
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
  store_tile<Element, Shape>(p, p.tile_rows, value_scale, shared, softmax, out);
}

}  // namespace mla::generic_sparse
