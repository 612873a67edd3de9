// mla_decode's attention for gfx942 and gfx950. docs/amd_decode.md explains the choices.
//
// A workgroup of four waves runs one part of the plan. For each item it keeps the queries in registers and walks the
// item's keys in blocks of 32 tokens:
//   S^T = K Q^T -> online softmax -> P through LDS -> O^T += V^T P^T, where V is the latent part of K.
#pragma once

#include "kernels/decode/gfx9/loads.h"
#include "kernels/decode/gfx9/scores.h"
#include "kernels/decode/gfx9/values.h"
#include "kernels/decode/items.cuh"

namespace mla::gfx9 {

// Zeros for what is not finite in the values of tokens from `first` on, some of whose rows do not see them: their
// weight of 0 would make it NaN. Rows that do see a NaN have a weight of NaN.
template <class Element, class Shared>
__device__ __forceinline__ void hide_nan(Shared& shared, Block& block, int first, int end, int thread) {
  constexpr uint32_t kExponent = std::is_same_v<Element, F16> ? 0x7C00 : 0x7F80;
#pragma clang loop unroll(disable) vectorize(disable)  // seldom needed
  for (int token = first; token < end; ++token) {
    uint32_t& two = reinterpret_cast<uint32_t*>(block.latent[token])[thread];
    uint32_t bits = two;
    if ((bits & kExponent) == kExponent) bits &= 0xFFFF0000;
    if ((bits >> 16 & kExponent) == kExponent) bits &= 0x0000FFFF;
    two = bits;
    if constexpr (Shared::kScaled) {
      if (thread < kScaleGroups && !isfinite(shared.key_scales[thread][token])) shared.key_scales[thread][token] = 0;
    }
  }
}

// Their loads end here. Otherwise the first use would wait for them, which is in the loop over blocks, and with them in
// each turn for all that is on its way.
template <class Element, class Shape>
__device__ __forceinline__ void wait_for_queries(Queries<Element, Shape>& queries) {
#pragma unroll
  for (int m = 0; m < Shape::kRowFragments; ++m) {
#pragma unroll
    for (int k = 0; k < Shape::kSteps; ++k) asm volatile("" : "+v"(queries[m][k]));
  }
}

// What a kernel does with its work: one item of a plan, or one piece of indices.
struct Job {
  int64_t first_row;      // of the queries
  int64_t first_out_row;  // of out and lse, or of the partials
  int32_t rows;
  bool direct;
  uint32_t begin, end;  // tokens
  float scale;          // of the scores, in base 2
  float value_scale;
};

// Queries of a lane's rows, and the first token each does not see; `hidden`: the first that some row does not see.
template <class Shape>
struct Visible {
  uint32_t end[Shape::kRowFragments];
  uint32_t hidden;
};

template <class Element, class Shape, class Blocks, class Shared>
__device__ __forceinline__ void attend(const Job& job, const Visible<Shape>& visible,
                                       const Queries<Element, Shape>& queries, Blocks& blocks, Shared& shared, int wave,
                                       int lane, Softmax<Shape>& softmax, Output<Shape>& out) {
  constexpr int kTokens = Shape::kTokens;
  const int row_group = wave / Shape::kTokenGroups, token_group = wave % Shape::kTokenGroups;
#pragma unroll 1
  for (uint32_t first = job.begin; first < job.end; first += kTokens) {
    Block& block = blocks.next(shared, first, lane);
    const int32_t valid = *reinterpret_cast<const int32_t*>(shared.valid);
    Scores<Shape> scores;
    score_block<Element, Shape>(shared, block, queries, token_group, lane, scores);

    int32_t seen[Shape::kRowFragments];
#pragma unroll
    for (int m = 0; m < Shape::kRowFragments; ++m) seen[m] = static_cast<int32_t>(visible.end[m] - first);
    float highest[Shape::kRowFragments];
    const bool all_visible = visible.hidden >= first + kTokens;
    mask_scores<Shape>(uniform(valid), seen, all_visible, job.scale, token_group, lane, scores, highest);
    if constexpr (Shape::kTokenGroups > 1) {
#pragma unroll
      for (int m = 0; m < Shape::kRowFragments; ++m) {
        const int row = (row_group * Shape::kRowFragments + m) * 16 + lane % 16;
        shared.highest[token_group][row] = highest[m];  // four lanes the same
      }
      lds_barrier();
#pragma unroll
      for (int m = 0; m < Shape::kRowFragments; ++m) {
        const int row = (row_group * Shape::kRowFragments + m) * 16 + lane % 16;
        highest[m] = LargestOfResults()(highest[m], shared.highest[1 - token_group][row]);
      }
    }
    weigh_block<Element, Shape>(shared, scores, highest, row_group, token_group, lane, softmax);
    if (visible.hidden < first + kTokens) {
      lds_barrier();  // everyone has read the keys
      const int32_t begin = max_of(static_cast<int32_t>(visible.hidden - first), 0);
      hide_nan<Element>(shared, block, begin, min_of(job.end - first, kTokens), wave * kWave + lane_anew());
    }
    lds_barrier();
    rescale_output<Shape>(shared, lane, out);
    accumulate_block<Element, Shape>(shared, block, wave, lane, out);
  }
}

// A job's sums, from its queries and tokens.
template <class Query, class Element, class Shape, class Blocks, class Params, class Shared>
__device__ __forceinline__ void attend_to(const Params& p, const Job& job, const Visible<Shape>& visible,
                                          const typename Blocks::Tokens& tokens, Shared& shared, int wave, int lane,
                                          Softmax<Shape>& softmax, Output<Shape>& out) {
  Queries<Element, Shape> queries;
  load_queries<Query, Element, Shape>(p, job.first_row, job.rows, wave / Shape::kTokenGroups, lane, queries);
  wait_for_queries<Element, Shape>(queries);
#pragma unroll
  for (int m = 0; m < Shape::kRowFragments; ++m) {
    softmax.reference[m] = kNoReference;
    softmax.sums[m] = F32x2{};
  }
#pragma unroll
  for (int m = 0; m < Shape::kOutRowFragments; ++m) {
#pragma unroll
    for (int f = 0; f < Shape::kOutFragments; ++f) out[m][f] = F32x4{};
  }
  Blocks blocks(shared, tokens, job.begin, wave, lane);
  attend<Element, Shape>(job, visible, queries, blocks, shared, wave, lane, softmax, out);
}

template <class Out>
struct Results {
  Out* out;
  float* partial_out;
  float* lse;         // of one or the other
  const float* sink;  // of the job's first row on: a logit in base e that joins the sum of a row of out; null: none
};

// Normalises and stores the rows that exist. Behind it all waves have done with the last block.
template <class Out, class Shape, class Shared>
__device__ __forceinline__ void store_rows(const Job& job, const Results<Out>& results, Shared& shared,
                                           const Softmax<Shape>& softmax, const Output<Shape>& out, int wave,
                                           int lane) {
  const int row_group = wave / Shape::kTokenGroups, token_group = wave % Shape::kTokenGroups;
#pragma unroll
  for (int m = 0; m < Shape::kRowFragments; ++m) {
    const int row = (row_group * Shape::kRowFragments + m) * 16 + lane % 16;
    const float sum = reduce_over_row(softmax.sums[m].x + softmax.sums[m].y, Add());
    if (lane < 16) shared.sums[token_group][row] = sum;
  }
  lds_barrier();
  if (token_group == 0 && lane < 16) {
#pragma unroll
    for (int m = 0; m < Shape::kRowFragments; ++m) {
      const int row = (row_group * Shape::kRowFragments + m) * 16 + lane;
      float total = shared.sums[0][row];
      if (Shape::kTokenGroups > 1) total += shared.sums[Shape::kTokenGroups - 1][row];
      const bool empty = total == 0;  // no token was visible: what has the maximum weighs 1 or more
      const float lse = empty ? -INFINITY : (softmax.reference[m] + log2_approximate(total)) * kLn2;
      if (row < job.rows) {
        results.lse[job.first_out_row + row] = lse;
        if (results.sink != nullptr) total += exp2_approximate(results.sink[row] * kLog2E - softmax.reference[m]);
      }
      shared.rescale[0][row % 16][row / 16] = empty ? 0 : job.value_scale / total;
    }
  }
  lds_barrier();
#pragma unroll
  for (int m = 0; m < Shape::kOutRowFragments; ++m) {
    const int row = m * 16 + lane % 16;
    const float factor = shared.rescale[0][row % 16][m];
    const int64_t start = (job.first_out_row + row) * kLatent + wave * Shape::kOutColumns;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Columns columns = columns_of(out[m], i, lane);
      if (row >= job.rows) continue;
      if (job.direct)
        store_columns(results.out + start, columns, factor);
      else
        store_columns(results.partial_out + start, columns, factor);
    }
  }
}

// As uniform of 32 bits.
__device__ __forceinline__ int64_t uniform(int64_t value) {
  const auto low = static_cast<uint32_t>(mla::uniform(static_cast<int32_t>(value)));
  return static_cast<int64_t>(mla::uniform(static_cast<int32_t>(value >> 32))) << 32 | low;
}

// The kernel's parameters, read anew: without it the compiler keeps most of them in scalar registers throughout, more
// than there are. They are the kernel's first argument.
template <class Params>
__device__ __forceinline__ const Params& reread_params() {
  auto* arguments = (const __attribute__((address_space(4))) Params*)__builtin_amdgcn_kernarg_segment_ptr();
  asm volatile("" : "+s"(arguments));
  return *(const Params*)arguments;
}

// k_scale of the layer, by which scores and values are multiplied.
template <class Params>
__device__ __forceinline__ float key_scale(const Params& p, int32_t layer) {
  if (p.k_scale == nullptr) return 1;
  return bits_as<float>(load_uniform(reinterpret_cast<const int32_t*>(p.k_scale) + (p.k_scales > 1 ? layer : 0)));
}
template <class Params>
__device__ __forceinline__ float query_scale(const Params& p) {
  return p.q_scale == nullptr ? 1 : bits_as<float>(load_uniform(reinterpret_cast<const int32_t*>(p.q_scale)));
}

// `Query`: the elements of the queries; `Element`: those of the products; `Out`: those of out.
template <class Query, class Element, class Out, class Shape, class Blocks, class Shared>
__device__ __forceinline__ void decode_items(Shared& shared) {
  const DecodeParams& first_params = reread_params<DecodeParams>();
  const int32_t layer = first_params.layer == nullptr ? 0 : load_uniform(first_params.layer);
  if (layer < 0 || layer >= first_params.layers) return;
  const int wave = wave_id();
  const int row_group = wave / Shape::kTokenGroups;

  Items items(first_params);
#pragma unroll 1
  while (items.next(reread_params<DecodeParams>())) {
    const DecodeParams& p = reread_params<DecodeParams>();
    const int lane = lane_anew();
    Tile tile;
    if (!find_tile(p, items.item(), tile)) continue;
    if (p.pages == 0) tile.kv_end = 0;
    Job job;
    job.first_row = uniform(tile.first_row);
    job.rows = mla::uniform(tile.rows);
    const int32_t partial = mla::uniform(tile.partial);
    const bool direct = partial < 0;
    const unsigned char* layer_begin =
        static_cast<const unsigned char*>(p.cache) + layer * p.pages * p.page_size * Blocks::kTokenBytes;
    job.first_out_row = direct ? job.first_row : int64_t{partial} * p.plan.tile_rows;
    job.direct = direct;
    job.begin = mla::uniform(tile.kv_begin);
    job.end = mla::uniform(max_of(tile.kv_end, tile.kv_begin));
    job.value_scale = key_scale(p, layer);
    job.scale = p.scale * kLog2E * job.value_scale * query_scale(p);

    Visible<Shape> visible;
#pragma unroll
    for (int m = 0; m < Shape::kRowFragments; ++m) {
      const int row = (row_group * Shape::kRowFragments + m) * 16 + lane % 16;
      visible.end[m] = visible_end(p, tile, row);
    }
    visible.hidden = mla::uniform(visible_end(p, tile, 0));
    lds_barrier();  // everyone has done with the item before
    Softmax<Shape> softmax;
    Output<Shape> out;
    attend_to<Query, Element, Shape, Blocks>(p, job, visible, typename Blocks::Tokens(p, tile, job.end, layer_begin),
                                             shared, wave, lane, softmax, out);
    const DecodeParams& last = reread_params<DecodeParams>();
    const Results<Out> results{static_cast<Out*>(last.out), last.partial_out, job.direct ? last.lse : last.partial_lse,
                               nullptr};
    store_rows<Out, Shape>(job, results, shared, softmax, out, wave, lane_anew());
  }
}

// The part of a workgroup, by one of two copies of the same code: the sizes of pages that are looked up block by block
// have one without what the others need.
template <class Query, class Element, class Out, class Shape, class Format>
__device__ __forceinline__ void decode_part() {
  using Blocks = typename BlocksOf<Format, PagedTokens>::Type;
  using ScatteredBlocks = typename BlocksOf<Format, ScatteredTokens>::Type;
  __shared__ Shared<Shape, Blocks::kStages, Blocks::kScaled> shared;
  if (reread_params<DecodeParams>().page_size % kWaveTokens == 0)
    decode_items<Query, Element, Out, Shape, Blocks>(shared);
  else
    decode_items<Query, Element, Out, Shape, ScatteredBlocks>(shared);
}

}  // namespace mla::gfx9
