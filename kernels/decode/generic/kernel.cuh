// mla_decode for any GPU from sm_80 on: mma.sync over blocks of the paged cache, which cp.async keeps in flight.
//
// A CTA runs one part of the plan. For each item it keeps the queries in registers and walks the item's keys:
//   S = Q K^T -> shared memory -> online softmax -> P, shared memory -> O += P V, where V is the latent part of K.
// The scheme is FlashAttention-2's (arXiv 2307.08691) with all heads of the absorbed form (DeepSeek-V2, arXiv
// 2405.04434) as the rows of one matrix product.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/decode/generic/fragments.cuh"
#include "kernels/decode/generic/queries.cuh"
#include "kernels/decode/generic/shape.h"
#include "kernels/decode/generic/tokens.cuh"
#include "kernels/decode/softmax.h"
#include "kernels/decode/work.cuh"

namespace mla {

// D fragments of neighbouring pairs of products, times the scales of their tokens.
template <class Shape, int kPairs>
__device__ __forceinline__ void scale_scores(const float* scales, float (&sum)[kPairs][2][Shape::kRowFragments][4]) {
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 two = *reinterpret_cast<const float2*>(scales + pair * 16 + n * 8);
#pragma unroll
      for (int m = 0; m < Shape::kRowFragments; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[pair][n][m][i] *= i % 2 == 0 ? two.x : two.y;
      }
    }
  }
}

// A warp's part of Q K^T, written to its quarter of the scores. `key_scales`: [quarters][tokens], where keys have any.
template <class Cached, class Shape>
__device__ __forceinline__ void score_block(const Queries<Shape>& queries, uint32_t block, SharedMemory<Shape>& shared,
                                            int row_group, int token_group, int quarter,
                                            const float* key_scales = nullptr) {
  using Fragments = Fragments<Cached, Shape>;
  using Element = typename Fragments::Element;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t lane_block =
      block + token_group * Shape::kTokenPairs * 16 * Shape::kTokenBytes + Fragments::key_offset(lane, quarter);
  // Registers allow 64 rows only one pair of products at once.
  constexpr int kAtOnce = Shape::kRows == 64 ? 1 : Shape::kTokenPairs;
  constexpr int kUnrolled = Shape::kRows == 64 && Shape::kElementBytes == 1 ? 1 : Shape::kTokenPairs / kAtOnce;
#pragma unroll(kUnrolled)
  for (int first = 0; first < Shape::kTokenPairs; first += kAtOnce) {
    float sum[kAtOnce][2][Shape::kRowFragments][4] = {};
    typename Fragments::Search nan[kAtOnce];
#pragma unroll
    for (int k = 0; k < Shape::kSteps; ++k) {
      if (Shape::kGroupScales && k == Shape::kSteps - 1) {  // what follows is the rope
        const int token = (token_group * Shape::kTokenPairs + first) * 16 + 2 * t;
        scale_scores<Shape, kAtOnce>(key_scales + quarter * Shape::kTokens + token, sum);
      }
#pragma unroll
      for (int pair = 0; pair < kAtOnce; ++pair) {
        uint32_t keys[4];
        const int offset = (first + pair) * 16 * Shape::kTokenBytes + k * Shape::kKeyStep * Shape::kElementBytes;
        Fragments::load_keys(keys, lane_block + offset, nan[pair]);
#pragma unroll
        for (int m = 0; m < Shape::kRowFragments; ++m) {
          ptx::mma_m16n8k16<Element>(sum[pair][0][m], queries[m][k], keys[0], keys[1]);
          ptx::mma_m16n8k16<Element>(sum[pair][1][m], queries[m][k], keys[2], keys[3]);
        }
      }
    }
#pragma unroll
    for (int pair = 0; pair < kAtOnce; ++pair) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        nan[pair].mark(n, sum[pair][n]);
        const int token = (token_group * Shape::kTokenPairs + first + pair) * 16 + n * 8 + 2 * t;
#pragma unroll
        for (int m = 0; m < Shape::kRowFragments; ++m) {
          const int row = (row_group * Shape::kRowFragments + m) * 16 + g;
          const float (&d)[4] = sum[pair][n][m];
          *reinterpret_cast<float2*>(&shared.scores[quarter][row][token]) = make_float2(d[0], d[1]);
          *reinterpret_cast<float2*>(&shared.scores[quarter][row + 8][token]) = make_float2(d[2], d[3]);
        }
      }
    }
  }
}

// Online softmax state of the rows that a thread works on, with seven neighbours: their keys are dealt out among them.
template <class Shape>
struct Softmax {
  float reference[Shape::kSoftmaxPasses];  // of the exponents, in base 2; the same in all eight lanes
  float sum[Shape::kSoftmaxPasses];        // over this lane's keys
};

// Sum of the four quarters, masked, as weights 2^(score - reference). True: some row has to be rescaled.
template <class Element, class Shape>
__device__ __forceinline__ bool weigh_block(SharedMemory<Shape>& shared, const int32_t* slots, int32_t first_token,
                                            float scale, Softmax<Shape>& softmax) {
  constexpr int kTokens = Shape::kTokens;
  constexpr int kVectors = Shape::kSoftmaxVectors;
  constexpr uint32_t kWholeWarp = 0xFFFFFFFF;
  const int thread = thread_number<Shape>(), lane = thread % Shape::kSoftmaxLanes;
  bool rescaled = false;
#pragma unroll
  for (int pass = 0; pass < Shape::kSoftmaxPasses; ++pass) {
    const int row = pass * Shape::kSoftmaxRows + thread / Shape::kSoftmaxLanes;
    if (Shape::kRows < Shape::kSoftmaxRows && row >= Shape::kRows) break;  // whole warps
    const int32_t visible = shared.visible_end[row] - first_token;
    float scales[Shape::kQuarters];
#pragma unroll
    for (int quarter = 0; quarter < Shape::kQuarters; ++quarter) {
      scales[quarter] = Shape::kElementBytes == 1 ? shared.query_scale[row][quarter] : 1.0f;
    }
    float score[kVectors][4];
    float highest = -INFINITY;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int token = v * 32 + lane * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) score[v][i] = 0;
      int4 slot{-1, -1, -1, -1};
      if (kTokens % 32 == 0 || token < kTokens) {
        slot = *reinterpret_cast<const int4*>(slots + token);
#pragma unroll
        for (int quarter = 0; quarter < Shape::kQuarters; ++quarter) {
          const float4 part = *reinterpret_cast<const float4*>(&shared.scores[quarter][row][token]);
          const float factor = scales[quarter];
          score[v][0] += part.x * factor;
          score[v][1] += part.y * factor;
          score[v][2] += part.z * factor;
          score[v][3] += part.w * factor;
        }
      }
      score[v][0] = slot.x >= 0 && token + 0 < visible ? score[v][0] * scale : -INFINITY;
      score[v][1] = slot.y >= 0 && token + 1 < visible ? score[v][1] * scale : -INFINITY;
      score[v][2] = slot.z >= 0 && token + 2 < visible ? score[v][2] * scale : -INFINITY;
      score[v][3] = slot.w >= 0 && token + 3 < visible ? score[v][3] * scale : -INFINITY;
#pragma unroll
      for (int i = 0; i < 4; ++i) highest = fmaxf(highest, score[v][i]);
    }
#pragma unroll
    for (int distance = 1; distance < Shape::kSoftmaxLanes; distance *= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, distance));
    }

    float& reference = softmax.reference[pass];
    float factor = 1;
    if (highest > reference + kSlack) {
      if (reference != -INFINITY) {  // else there is nothing yet to rescale
        factor = ptx::exp2_approximate(reference - highest);
        rescaled = true;
      }
      reference = highest;
    }
    softmax.sum[pass] *= factor;
    if (lane == 0) shared.rescale[row] = factor;

    const float shift = reference == -INFINITY ? 0 : reference;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int token = v * 32 + lane * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[v][i] = ptx::exp2_approximate(score[v][i] - shift);
        softmax.sum[pass] += score[v][i];
      }
      if (kTokens % 32 == 0 || token < kTokens) {
        *reinterpret_cast<uint2*>(&shared.weights[row][token]) =
            make_uint2(pack<Element>(score[v][0], score[v][1]), pack<Element>(score[v][2], score[v][3]));
      }
    }
  }
  return rescaled;
}

// Zeros for what is not finite in the values of tokens from `first` on, some of whose rows do not see them: their
// weight of 0 would make it NaN. Rows that do see a NaN have a weight of NaN.
template <class Cached, class Shape>
__device__ __forceinline__ void hide_nan(unsigned char* block, int32_t first, int32_t end) {
  const int thread = thread_number<Shape>(), warp = thread / 32, lane = thread % 32;
#pragma unroll 1  // seldom needed: registers count, not time
  for (int32_t token = first + warp; token < end; token += Shape::kWarps) {
    auto* words = reinterpret_cast<uint32_t*>(block + token * Shape::kTokenBytes);
#pragma unroll 1
    for (int i = lane; i < Shape::kTokenBytes / 4; i += 32) words[i] = Fragments<Cached, Shape>::finite(words[i]);
  }
}

// The same for their scales.
template <class Shape>
__device__ __forceinline__ void hide_scales(float* scales, int32_t first) {
  for (int i = thread_number<Shape>(); i < Shape::kQuarters * Shape::kTokens; i += Shape::kThreads) {
    if (i % Shape::kTokens >= first && !(fabsf(scales[i]) < INFINITY)) scales[i] = 0;
  }
}

template <class Shape>
using Output = float[Shape::kOutRowFragments][2 * Shape::kOutPairs][4];

template <class Shape>
__device__ __forceinline__ void rescale_output(const float* rescale, Output<Shape>& out) {
  const int g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int m = 0; m < Shape::kOutRowFragments; ++m) {
    const float upper = rescale[m * 16 + g], lower = rescale[m * 16 + 8 + g];
#pragma unroll
    for (int n = 0; n < 2 * Shape::kOutPairs; ++n) {
      out[m][n][0] *= upper;
      out[m][n][1] *= upper;
      out[m][n][2] *= lower;
      out[m][n][3] *= lower;
    }
  }
}

// A fragments of bf16, of 16 tokens, times their scales.
template <class Shape>
__device__ __forceinline__ void scale_weights(const float* scales, uint32_t (&p)[Shape::kOutRowFragments][4]) {
  const int t = threadIdx.x % 4;
  const float2 low = *reinterpret_cast<const float2*>(scales + 2 * t);
  const float2 high = *reinterpret_cast<const float2*>(scales + 8 + 2 * t);
#pragma unroll
  for (int m = 0; m < Shape::kOutRowFragments; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 scale = i < 2 ? low : high;
      p[m][i] = pack<__nv_bfloat16>(__uint_as_float(p[m][i] << 16) * scale.x,
                                    __uint_as_float(p[m][i] & 0xFFFF0000) * scale.y);
    }
  }
}

// O += P V for the 64 columns of this warp.
template <class Cached, class Shape>
__device__ __forceinline__ void accumulate_block(uint32_t weights, uint32_t block, Output<Shape>& out,
                                                 const float* key_scales = nullptr) {
  using Fragments = Fragments<Cached, Shape>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // P as A fragments. Matrices: rows 0-7 tokens 0-7, rows 8-15 tokens 0-7, rows 0-7 tokens 8-15, rows 8-15 tokens 8-15.
  const uint32_t lane_weights = weights + (lane % 16 * Shape::kWeightStride + lane / 16 * 8) * 2;
  const uint32_t lane_block = block + Fragments::value_offset(lane, warp);
  constexpr int kUnrolled = Shape::kRows == 64 && Shape::kElementBytes == 1 ? 1 : Shape::kTokens / 16;
#pragma unroll(kUnrolled)
  for (int k = 0; k < Shape::kTokens / 16; ++k) {
    uint32_t p[Shape::kOutRowFragments][4];
#pragma unroll
    for (int m = 0; m < Shape::kOutRowFragments; ++m) {
      ptx::ldmatrix_x4(p[m], lane_weights + (m * 16 * Shape::kWeightStride + k * 16) * 2);
    }
    if constexpr (Shape::kGroupScales) {
      scale_weights<Shape>(key_scales + warp % Shape::kQuarters * Shape::kTokens + k * 16, p);
    }
#pragma unroll
    for (int pair = 0; pair < Shape::kOutPairs; ++pair) {
      uint32_t values[4];
      const int offset = k * 16 * Shape::kTokenBytes + pair * Shape::kValueStep * Shape::kElementBytes;
      Fragments::load_values(values, lane_block + offset);
#pragma unroll
      for (int m = 0; m < Shape::kOutRowFragments; ++m) {
        ptx::mma_m16n8k16<typename Fragments::Element>(out[m][2 * pair], p[m], values[0], values[1]);
        ptx::mma_m16n8k16<typename Fragments::Element>(out[m][2 * pair + 1], p[m], values[2], values[3]);
      }
    }
  }
}

// A lane's columns of 16 in one row, from its part of two products, which it gives a factor; `target`: column 0.
template <class Cached, class Target>
__device__ __forceinline__ void store_columns(Target* target, const float (&first)[4], const float (&second)[4],
                                              int half, float factor) {
  const int t = threadIdx.x % 4, i = 2 * half;
  if constexpr (std::is_same_v<Cached, E4M3FN>) {  // the even and the odd columns
    const float values[4] = {first[i] * factor, second[i] * factor, first[i + 1] * factor, second[i + 1] * factor};
    Vector<Target, 4> four;
    for (int c = 0; c < 4; ++c) four.at[c] = from_float<Target>(values[c]);
    *reinterpret_cast<Vector<Target, 4>*>(target + 4 * t) = four;
  } else {
    const Vector<Target, 2> left{{from_float<Target>(first[i] * factor), from_float<Target>(first[i + 1] * factor)}};
    const Vector<Target, 2> right{{from_float<Target>(second[i] * factor), from_float<Target>(second[i + 1] * factor)}};
    *reinterpret_cast<Vector<Target, 2>*>(target + 2 * t) = left;
    *reinterpret_cast<Vector<Target, 2>*>(target + 8 + 2 * t) = right;
  }
}

// k_scale of the layer, by which scores and values are multiplied.
template <class Params>
__device__ __forceinline__ float key_scale(const Params& p) {
  if (p.k_scale == nullptr) return 1;
  return p.k_scale[p.k_scales > 1 && p.layer != nullptr ? *p.layer : 0];
}

// Normalises and stores the rows that exist: to out and lse, or to the item's partial. `tile_rows`: of a partial.
template <class Cached, class Shape, class Params>
__device__ __forceinline__ void store_tile(const Params& p, int32_t tile_rows, float value_scale,
                                           SharedMemory<Shape>& shared, const Softmax<Shape>& softmax,
                                           const Output<Shape>& out) {
  const Tile tile = shared.tile;  // before the barrier below, behind which it may be the next item's
  const bool direct = tile.partial < 0;
  const int64_t first_row = direct ? tile.first_row : partial_row(p, tile.partial, tile.first_row, tile_rows);
#pragma unroll
  for (int pass = 0; pass < Shape::kSoftmaxPasses; ++pass) {
    const int row = pass * Shape::kSoftmaxRows + static_cast<int>(threadIdx.x) / Shape::kSoftmaxLanes;
    if (Shape::kRows < Shape::kSoftmaxRows && row >= Shape::kRows) break;
    float sum = softmax.sum[pass];
#pragma unroll
    for (int distance = 1; distance < Shape::kSoftmaxLanes; distance *= 2) {
      sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
    }
    if (threadIdx.x % Shape::kSoftmaxLanes == 0) {
      const bool empty = sum == 0;  // no key was visible: what has the maximum weighs 1 or more
      float inverse = empty ? 0 : value_scale / sum;
      if (row < tile.rows && !empty && direct) add_sink(p, tile, row, sum, softmax.reference[pass], inverse);
      shared.inverse[row] = inverse;
      const float lse = empty ? -INFINITY : softmax.reference[pass] * kLn2 + logf(sum);
      if (row < tile.rows) (direct ? p.lse : p.partial_lse)[first_row + row] = lse;
    }
  }
  __syncthreads();

  const int lane = threadIdx.x % 32, g = lane / 4, warp = threadIdx.x / 32;
#pragma unroll
  for (int m = 0; m < Shape::kOutRowFragments; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * 16 + half * 8 + g;
      if (row >= tile.rows) continue;
      const float inverse = shared.inverse[row];
      const int64_t start = (first_row + row) * kLatent;
      const auto store = [&](auto* target) {
#pragma unroll
        for (int pair = 0; pair < Shape::kOutPairs; ++pair) {
          const int column = Shape::column_group(warp + pair * Shape::kWarps) * 16;
          store_columns<Cached>(target + start + column, out[m][2 * pair], out[m][2 * pair + 1], half, inverse);
        }
      };
      if (!direct)
        store(p.partial_out);
      else if constexpr (!std::is_same_v<Cached, E4M3FN>)
        store(static_cast<Cached*>(p.out));
      else if (p.out_dtype == DType::kBF16)
        store(static_cast<__nv_bfloat16*>(p.out));
      else
        store(static_cast<__half*>(p.out));
    }
  }
}

// With three stages, say, two blocks are on their way while the third is worked on.
__device__ __forceinline__ void wait_for_block(int stages) {
  if (stages == 2) {
    ptx::cp_async_wait<0>();
  } else if (stages == 3) {
    ptx::cp_async_wait<1>();
  } else {
    ptx::cp_async_wait<2>();
  }
}

// `Cached`: the element type of the cache, and of queries and output unless it is e4m3fn; that takes any. Or DsMla,
// beside bf16.
template <class Cached, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParams p, int stages) {
  using Source = Tokens<Cached, Shape>;
  using Element = typename Multiplied<Cached>::Type;
  constexpr int kTokens = Shape::kTokens;
  constexpr bool kDsMla = std::is_same_v<Cached, DsMla>;
  constexpr bool kFp8 = std::is_same_v<Cached, E4M3FN>;
  extern __shared__ __align__(1024) unsigned char shared_base[];
  auto& shared = *reinterpret_cast<SharedMemory<Shape>*>(shared_base);
  unsigned char* const blocks = shared_base + sizeof(shared);
  const uint32_t ring = ptx::shared_address(blocks);
  const uint32_t weights = ptx::shared_address(shared.weights);
  ptx::launch_dependents();

  const int thread = threadIdx.x;
  // Through a shuffle the compiler knows that the warp's number is uniform.
  const int warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0);
  const int quarter = warp % Shape::kQuarters, group = warp / Shape::kQuarters;
  const int row_group = group % Shape::kRowGroups, token_group = group / Shape::kRowGroups;
  const int32_t layer_index = p.layer == nullptr ? 0 : *p.layer;
  if (layer_index < 0 || layer_index >= p.layers) return;
  if (thread == 0) {
    shared.layer =
        static_cast<const unsigned char*>(p.cache) + layer_index * p.pages * p.page_size * Source::kTokenBytes;
    shared.scale = p.scale * kLog2E;
    if (kFp8) shared.scale *= key_scale(p) * (p.q_scale == nullptr ? 1.0f : *p.q_scale);
  }

  const int32_t last_item = min_of(p.plan.part_offsets[blockIdx.x + 1], p.plan.max_items);
  for (int32_t item = max_of(p.plan.part_offsets[blockIdx.x], 0); item < last_item; ++item) {
    Tile tile;
    if (!find_tile(p, item, tile)) continue;
    int32_t remaining = tile.kv_end - tile.kv_begin;  // keys; none if not positive

    // Slots of the first blocks. The ring of slots turns with the ring of blocks.
    if (thread < stages * kTokens) {
      shared.slots[thread / kTokens][thread % kTokens] = look_up(p, tile, int64_t{tile.kv_begin} + thread).slot(p);
    }
    if (thread == 0) shared.tile = tile;
    if (thread < Shape::kRows) shared.visible_end[thread] = visible_end(p, tile, thread);
    __syncthreads();
    for (int i = 0; i < stages - 1; ++i) {
      if (remaining > i * kTokens) Source::load(shared.layer, ring + i * Source::kStageBytes, shared.slots[i]);
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
        Source::load(shared.layer, ring + free_stage * Source::kStageBytes, shared.slots[free_stage]);
      }
      ptx::cp_async_commit();  // an empty group counts too
      SlotLookup later{-1, 0};
      const int32_t first_token = shared.tile.kv_end - remaining;
      if (thread < kTokens) later = look_up(p, shared.tile, int64_t{first_token} + stages * kTokens + thread);

      unsigned char* tokens = blocks + stage * Source::kStageBytes;
      float* scales = nullptr;
      if constexpr (kDsMla) {
        unsigned char* const unpacked = blocks + stages * Source::kStageBytes;
        scales = reinterpret_cast<float*>(unpacked + Shape::kBlockBytes);
        Source::unpack(tokens, unpacked, scales);
        tokens = unpacked;
        __syncthreads();
      }
      const uint32_t block = kDsMla ? ptx::shared_address(tokens) : ring + stage * Source::kStageBytes;
      score_block<Element, Shape>(queries, block, shared, row_group, token_group, quarter, scales);
      const int32_t later_slot = later.slot(p);
      __syncthreads();
      const bool rescaled = weigh_block<typename Fragments<Element, Shape>::Element, Shape>(
          shared, shared.slots[stage], first_token, shared.scale, softmax);
      const int32_t first_hidden = max_of(shared.visible_end[0] - first_token, 0);  // from some row
      if (first_hidden < kTokens) {
        hide_nan<Element, Shape>(tokens, first_hidden, min_of(remaining, kTokens));
        if constexpr (kDsMla) hide_scales<Shape>(scales, first_hidden);
      }
      if (__syncthreads_or(rescaled)) rescale_output<Shape>(shared.rescale, out);
      if (thread < kTokens) shared.slots[stage][thread] = later_slot;
      accumulate_block<Element, Shape>(weights, block, out, scales);
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
    store_tile<Element, Shape>(p, p.plan.tile_rows, Shape::kElementBytes == 1 ? key_scale(p) : 1.0f, shared, softmax,
                               out);
  }
}

}  // namespace mla
