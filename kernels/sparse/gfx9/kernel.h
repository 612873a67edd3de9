// mla_sparse_decode's attention for gfx942 and gfx950: the dense kernel's scheme over tokens that are chosen one by
// one.
//
// A workgroup has one query token, a tile of its heads and one piece of its indices. An index that names no token is
// zeros in LDS and -inf among the scores.
#pragma once

#include "kernels/decode/gfx9/kernel.h"
#include "kernels/sparse/gfx9/tokens.h"

namespace mla::gfx9 {

template <class Query, class Element, class Out, class Shape, class Blocks>
__device__ __forceinline__ void sparse_piece() {
  const SparseDecodeParams& p = reread_params<SparseDecodeParams>();
  __shared__ Shared<Shape, Blocks::kStages, Blocks::kScaled> shared;
  const int wave = wave_id(), lane = lane_anew();
  const uint32_t tiles = ceil_div(p.heads, p.tile_rows), index = blockIdx.x;
  const int32_t split = index % p.splits, tile = index / p.splits % tiles, token = index / p.splits / tiles;
  const int32_t layer = p.layer == nullptr ? 0 : load_uniform(p.layer);
  const bool has_layer = layer >= 0 && layer < p.layers && p.slots > 0;
  const Piece piece = piece_of(p.topk, p.splits, split);

  Job job;
  const int32_t first_head = tile * p.tile_rows;
  job.rows = min_of(p.tile_rows, p.heads - first_head);
  job.first_row = int64_t{token} * p.heads + first_head;
  job.direct = p.splits == 1;
  job.first_out_row = job.first_row + (job.direct ? 0 : int64_t{split} * p.tokens * p.heads);
  job.begin = piece.begin;
  int32_t end = piece.end;
  if (p.topk_lens != nullptr) end = max_of(min_of(end, load_uniform(p.topk_lens + token)), piece.begin);
  job.end = has_layer ? end : job.begin;
  job.value_scale = key_scale(p, has_layer ? layer : 0);
  job.scale = p.scale * kLog2E * job.value_scale * query_scale(p);

  Visible<Shape> visible;
#pragma unroll
  for (int m = 0; m < Shape::kRowFragments; ++m) visible.end[m] = job.end;
  visible.hidden = ~0u;
  const int64_t layer_bytes = p.slots * Blocks::kTokenBytes;
  const typename Blocks::Tokens tokens{
      static_cast<const unsigned char*>(p.cache) + (has_layer ? layer : 0) * layer_bytes,
      p.indices + int64_t{token} * p.topk, job.end, static_cast<uint32_t>(p.slots)};
  Softmax<Shape> softmax;
  Output<Shape> out;
  attend_to<Query, Element, Shape, Blocks>(p, job, visible, tokens, shared, wave, lane, softmax, out);

  const SparseDecodeParams& last = reread_params<SparseDecodeParams>();
  const Results<Out> results{static_cast<Out*>(last.out), last.partial_out, job.direct ? last.lse : last.partial_lse,
                             job.direct && last.sink != nullptr ? last.sink + first_head : nullptr};
  store_rows<Out, Shape>(job, results, shared, softmax, out, wave, lane_anew());
}

}  // namespace mla::gfx9
