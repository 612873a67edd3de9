// Tokens as they are cached, read by the warps that attend. Codes become fp16 in registers, exactly, on their way into
// the products. Where a token has a scale for each 128 columns (fp8_ds_mla), those are applied in fp32 to the sums of
// the scores, after each 128 columns; and for the output to the weights, of which each quarter of its columns has its
// own set, or in wide tiles to the values. So no score is rounded that a 16-bit cache would not round.
#pragma once

#include "kernels/decode/sm90/fp8/output.cuh"
#include "kernels/decode/sm90/fp8/scores.cuh"
#include "kernels/sparse/sm90/fp8/scales.cuh"
#include "kernels/sparse/sm90/fp8/shape.h"

namespace mla::sparse_sm90::fp8 {

// Where this lane's rows of the left operand lie in a slot: lanes 0-15 address the warp's tokens at 16 bytes, lanes
// 16-31 at the next 16. `kSlotWarps`: whose tokens share a slot.
template <class Layout, int kWarps = sm90::fp8::kGroupWarps>
struct Keys {
  static constexpr int kSlotWarps = kWarps;
  using Scales = std::conditional_t<(Layout::kScales > 0), TokenScales, dense::NoScales>;
  uint32_t line;

  __device__ __forceinline__ explicit Keys(int warp) {
    const int lane = threadIdx.x % 32, token = warp * 16 + lane % 16;
    line = token * Layout::kStride + lane / 16 * 16;
  }

  // Of the product's row g. Found anew each time, since registers are short.
  static __device__ __forceinline__ uint32_t token() {
    const int thread = ptx::thread_index();
    return (thread / 32 % kSlotWarps * 16 + thread % 32 / 4) * Layout::kStride;
  }

  // `first`: of these loads, of 32 bytes each.
  template <int kLoads>
  __device__ __forceinline__ void load(uint32_t slot, int first, uint32_t (&bytes)[kLoads][4]) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) ptx::ldmatrix_x4(bytes[i], slot + line + (first + i) * 32);
  }
};

// Of wide tiles; found anew for each block, since registers are short.
template <class Layout>
struct WideKeys : Keys<Layout, dense::wide::Shape::kSlotTokens / 16> {
  using Base = Keys<Layout, dense::wide::Shape::kSlotTokens / 16>;

  __device__ __forceinline__ explicit WideKeys(int warp) : Base(warp) {
    const uint32_t lane = static_cast<uint32_t>(ptx::thread_index()) % 32;
    this->line = (lane % 16 + warp * 16) * Layout::kStride + lane / 16 * 16;
  }

  // As wide::Keys has it.
  __device__ __forceinline__ auto scales(uint32_t slot) const {
    if constexpr (Layout::kScales > 0) {
      const uint32_t thread = static_cast<uint32_t>(ptx::thread_index()) % (32 * Base::kSlotWarps);
      return WideTokenScales(slot, thread / 32 * 16 + thread % 32 / 4);
    } else {
      return dense::NoScales{};
    }
  }

  template <class Shape>
  static __device__ __forceinline__ void await_scales(uint32_t base, uint32_t slot, uint32_t parity) {
    if constexpr (Layout::kScales > 0) ptx::mbarrier_wait(base + Shape::kScaledOffset + slot * 8, parity);
  }
};

template <class Layout, int kSlotWarps, int kLoads>
__device__ __forceinline__ void load_key_bytes(const Keys<Layout, kSlotWarps>& keys, uint32_t slot, int first,
                                               uint32_t (&bytes)[kLoads][4]) {
  keys.load(slot, first, bytes);
}

// Products of kCount steps of fp8 columns from step kFirst on; the next bytes are fetched, and become operands, while
// the products before them run. `operands.bytes`: of the first step; then of the step behind the last, if there is one.
// kStarted: the first step's operands are made.
template <int kFirst, int kCount, int kAll, bool kStarted, class Shape, class Keys>
__device__ __forceinline__ void multiply(const Keys& keys, uint32_t slot, uint32_t queries,
                                         dense::KeyOperands<Shape>& operands, dense::Scores<Shape>& score) {
  constexpr int kBuffers = Shape::kScoreBuffers, kChunkProducts = dense::kProductColumns / dense::kProductDepth;
  auto& [bytes, fragments] = operands;
#pragma unroll
  for (int step = 0; step < kCount; ++step) {
    if (step >= kBuffers) ptx::wgmma_wait<kBuffers - 1>();
    if (!kStarted || step > 0) dense::expand_keys(bytes, fragments[step % kBuffers]);
    if (kFirst + step + 1 < kAll) keys.load(slot, (kFirst + step + 1) * Shape::kLoads, bytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Shape::kProducts; ++i) {
      const int product = (kFirst + step) * Shape::kProducts + i;
      const int offset = product / kChunkProducts * Shape::kQueryChunkBytes + product % kChunkProducts * 32;
      ptx::register_wgmma(score, fragments[step % kBuffers][i], queries + offset / 16, product != 0);
    }
    ptx::wgmma_commit();
  }
}

template <class Shape>
__device__ __forceinline__ void score_block(const Keys<PerTensor>& keys, uint32_t slot, uint32_t empty,
                                            uint32_t queries, dense::NoScales&, dense::Scores<Shape>& score) {
  constexpr int kSteps = kWidth / dense::kProductDepth / Shape::kProducts;
  dense::KeyOperands<Shape> operands;
  keys.load(slot, 0, operands.bytes);
  multiply<0, kSteps, kSteps, /*kStarted=*/false, Shape>(keys, slot, queries, operands, score);
  ptx::mbarrier_arrive_warp(empty);
  ptx::wgmma_wait<0>();
}

// A quarter of the latent columns, and then all sums so far relative to the next quarter's scales.
template <int kQuarter, bool kStarted, class Shape, class Factors, int kSlotWarps>
__device__ __forceinline__ void score_quarter(const Keys<DsMla, kSlotWarps>& keys, const Factors& factors,
                                              uint32_t slot, uint32_t queries, dense::KeyOperands<Shape>& operands,
                                              dense::Scores<Shape>& score) {
  constexpr int kAll = kLatent / dense::kProductDepth / Shape::kProducts, kSteps = kAll / DsMla::kScales;
  multiply<kQuarter * kSteps, kSteps, kAll, kStarted && kQuarter == 0, Shape>(keys, slot, queries, operands, score);
  const float factor[2] = {factors.template factor<kQuarter + 1>(0), factors.template factor<kQuarter + 1>(1)};
  ptx::wgmma_wait<0>();
  ptx::hold(score);
#pragma unroll
  for (int i = 0; i < Shape::kRows / 2; ++i) score[i] *= factor[i / 2 % 2];
  ptx::hold(score);
}

// As dense decode's: the products of a block, the last of which still run.
template <class Shape, bool kStarted, int kSlotWarps>
__device__ __forceinline__ void multiply_scaled(const Keys<DsMla, kSlotWarps>& keys, uint32_t slot, uint32_t queries,
                                                dense::KeyOperands<Shape>& operands, dense::Scores<Shape>& score) {
  constexpr bool kWide = kSlotWarps < sm90::fp8::kGroupWarps;
  if constexpr (!kStarted) keys.load(slot, 0, operands.bytes);
  const std::conditional_t<kWide, PreparedFactors, QuarterFactors> factors{slot + keys.token() + DsMla::kScaleOffset};
  score_quarter<0, kStarted, Shape>(keys, factors, slot, queries, operands, score);
  score_quarter<1, kStarted, Shape>(keys, factors, slot, queries, operands, score);
  score_quarter<2, kStarted, Shape>(keys, factors, slot, queries, operands, score);
  score_quarter<3, kStarted, Shape>(keys, factors, slot, queries, operands, score);
  // The rope keys are bf16, as the product's left operand wants them.
  constexpr int kProducts = kRope / dense::kProductDepth;
  constexpr int kFirstLoad = DsMla::kRopeOffset / 16;
  static_assert(kProducts == Shape::kScoreBuffers * Shape::kProducts);
  const auto rope = [&](int i) -> uint32_t (&)[4] {
    return operands.fragments[i / Shape::kProducts][i % Shape::kProducts];
  };
#pragma unroll
  for (int i = 0; i < kProducts; ++i) ptx::ldmatrix_x4(rope(i), slot + keys.line + (kFirstLoad + 2 * i) * 16);
  const uint32_t rope_queries = queries + kLatent / dense::kProductColumns * Shape::kQueryChunkBytes / 16;
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    ptx::register_wgmma<DsMla::RopeElement>(score, rope(i), rope_queries + i * 32 / 16, true);
  }
  ptx::wgmma_commit();
}

template <class Shape, bool kStarted>
__device__ __forceinline__ void multiply_keys(const WideKeys<DsMla>& keys, uint32_t slot, uint32_t queries,
                                              dense::KeyOperands<Shape>& operands, dense::Scores<Shape>& score) {
  multiply_scaled<Shape, kStarted>(keys, slot, queries, operands, score);
}

template <class Shape>
__device__ __forceinline__ void score_block(const Keys<DsMla>& keys, uint32_t slot, uint32_t empty, uint32_t queries,
                                            TokenScales& scales, dense::Scores<Shape>& score) {
  dense::KeyOperands<Shape> operands;
  multiply_scaled<Shape, /*kStarted=*/false>(keys, slot, queries, operands, score);
  scales.load(slot + keys.token() + DsMla::kScaleOffset);
  ptx::mbarrier_arrive_warp(empty);
  ptx::wgmma_wait<0>();
  ptx::hold(score);
}

// As dense decode's, once for each scale of a token.
template <class Shape>
__device__ __forceinline__ void write_weights(const dense::Scores<Shape>& score, const TokenScales& scales,
                                              const float* references, int warp, uint32_t weights,
                                              dense::PerRow<Shape>& sum) {
  const int lane = threadIdx.x % 32, line = lane % 8, unit = 2 * warp + lane / 8 % 2;
  const uint32_t target = weights + line * dense::kLineBytes + ((unit ^ line) << 4);
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
    const float2 reference = dense::row_pair(references, j);
    float weight[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      weight[e] = ptx::exp2_approximate(score[4 * j + e] - (e % 2 == 0 ? reference.x : reference.y));
      sum[2 * j + e % 2] += weight[e] * scales.inverse[e / 2];
    }
#pragma unroll
    for (int i = 0; i < DsMla::kScales; ++i) {
      const float (&ratio)[2] = scales.ratio[i];
      ptx::stmatrix_x2_trans(target + i * Shape::kWeightSetBytes + j * 8 * dense::kLineBytes,
                             pack<__half>(weight[0] * ratio[0], weight[1] * ratio[0]),
                             pack<__half>(weight[2] * ratio[1], weight[3] * ratio[1]));
    }
  }
}

// How the output warps read a block: its tokens' lines, 16 columns a warp.
template <class Shape>
struct Values {
  static __device__ __forceinline__ uint32_t line(int group, int warp) {
    return threadIdx.x % 32 * Shape::Layout::kStride + (sm90::fp8::kGroupWarps * group + warp) * 16;
  }
  static __host__ __device__ constexpr int offset(int load) {
    return load / dense::kChunkLoads * dense::kLineBytes + load % dense::kChunkLoads * 32 * Shape::Layout::kStride;
  }
  // A group's chunk-th 64 columns lie in the chunk-th 128.
  static __host__ __device__ constexpr int weight_offset(int chunk) {
    return Shape::kWeightSets > 1 ? chunk * Shape::kWeightSetBytes : 0;
  }
  static constexpr bool kClears = false;  // there are zeros where no token is

  // As dense decode's.
  static __device__ __forceinline__ void scale(uint32_t slot, int chunk, uint32_t (&fragments)[2][4]) {
    if constexpr (Shape::Layout::kScales > 0) {
      const uint4 scales = ptx::load_shared_16(slot + SlotScales::kValues + chunk * SlotScales::kValueBytes +
                                               ptx::thread_index() % 4 * 16);
      const uint32_t pairs[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint32_t& values = fragments[i / 4][i % 4];
        values = ptx::multiply_halves(values, pairs[i / 2]);
      }
    }
  }
};

}  // namespace mla::sparse_sm90::fp8
