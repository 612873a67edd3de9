// Tokens as they are cached, read by the warps that attend. Codes become fp16 in registers, exactly, on their way into
// the products. Where a token has a scale for each 128 columns (fp8_ds_mla), those are applied in fp32: to the sums of
// the scores, after each 128 columns, and to the weights, of which each quarter of the output has its own set. So
// nothing is rounded that a 16-bit cache would not round.
#pragma once

#include "kernels/decode/sm90/fp8/output.cuh"
#include "kernels/decode/sm90/fp8/scores.cuh"
#include "kernels/sparse/sm90/fp8/shape.h"

namespace mla::sparse_sm90::fp8 {

// The four scales of a token, as bits.
struct ScaleBits {
  uint32_t of[DsMla::kScales];
  uint32_t largest;  // without its sign

  // `scales`: where they lie in shared memory.
  __device__ __forceinline__ explicit ScaleBits(uint32_t scales) {
    const uint4 bits = ptx::load_shared_16(scales);
    of[0] = bits.x;
    of[1] = bits.y;
    of[2] = bits.z;
    of[3] = bits.w;
    largest = max(max(bits.x & kMagnitude, bits.y & kMagnitude), max(bits.z & kMagnitude, bits.w & kMagnitude));
  }

  // By what the sums of the columns before quarter kQuarter are multiplied, which are relative to the scale of the
  // quarter before it, so that those of kQuarter can be added; behind the last one, so that they are scores. A scale
  // below 2^-60 of the token's largest counts as that, so that the quotients stay in range.
  template <int kQuarter>
  __device__ __forceinline__ float factor() const {
    static_assert(kQuarter > 0);
    const float before = clamped(of[kQuarter - 1]);
    if constexpr (kQuarter == DsMla::kScales) {
      return before;
    } else {
      return __fdividef(before, clamped(of[kQuarter]));
    }
  }

 private:
  static constexpr uint32_t kMagnitude = 0x7FFFFFFF;

  __device__ __forceinline__ float clamped(uint32_t bits) const {
    constexpr uint32_t kRange = 60u << 23, kNormal = 1u << 23;
    const uint32_t least = max(largest, kRange + kNormal) - kRange;
    return __uint_as_float(max(bits & kMagnitude, least) | (bits & ~kMagnitude));
  }
};

// Of two of a lane's tokens: rows g and g + 8 of its warp's sixteen.
//
// fp16 weights have to stay below 2^16, and scales may have any size. So a token's scores are lifted by the power of
// two above its largest scale: the references then follow what a token adds to the output, and its weights are
// relative to that power. Their sum, which has no scales, takes it back. A power below 2^-60 counts as that: the
// layout's own smallest scale is 2^-23.
struct TokenScales {
  float ratio[DsMla::kScales][2];  // of the scale and its token's power of two; below 1
  float exponent[2];               // of the power of two
  float inverse[2];                // of it

  // `scales`: where those of row g lie in shared memory.
  __device__ __forceinline__ void load(uint32_t scales) {
    constexpr int kLeast = 127 - 60, kMost = 253;  // whose inverse is a normal float
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const ScaleBits bits(scales + half * 8 * DsMla::kStride);
      const int power = min(max(static_cast<int>(bits.largest >> 23), kLeast) + 1, kMost);  // with a float's bias
      exponent[half] = static_cast<float>(power - 127);
      inverse[half] = __uint_as_float(static_cast<uint32_t>(254 - power) << 23);
#pragma unroll
      for (int i = 0; i < DsMla::kScales; ++i) ratio[i][half] = __uint_as_float(bits.of[i]) * inverse[half];
    }
  }

  template <class Shape>
  __device__ __forceinline__ void lift(dense::Scores<Shape>& score) const {
#pragma unroll
    for (int i = 0; i < Shape::kRows / 2; ++i) score[i] += exponent[i / 2 % 2];
  }
};

// Where this lane's rows of the left operand lie in a slot: lanes 0-15 address the warp's tokens at 16 bytes, lanes
// 16-31 at the next 16.
template <class Layout>
struct Keys {
  using Scales = std::conditional_t<(Layout::kScales > 0), TokenScales, dense::NoScales>;
  uint32_t line;

  __device__ __forceinline__ explicit Keys(int warp) {
    const int lane = threadIdx.x % 32, token = warp * 16 + lane % 16;
    line = token * Layout::kStride + lane / 16 * 16;
  }

  // Of the product's row g. Found anew each time, since registers are short.
  static __device__ __forceinline__ uint32_t token() {
    const int thread = ptx::thread_index();
    return (thread / 32 % sm90::fp8::kGroupWarps * 16 + thread % 32 / 4) * Layout::kStride;
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
struct WideKeys : Keys<Layout> {
  __device__ __forceinline__ explicit WideKeys(int warp) : Keys<Layout>(warp) {
    const uint32_t lane = static_cast<uint32_t>(ptx::thread_index()) % 32;
    this->line = (lane % 16 + warp * 16) * Layout::kStride + lane / 16 * 16;
  }
};

template <class Layout, int kLoads>
__device__ __forceinline__ void load_key_bytes(const Keys<Layout>& keys, uint32_t slot, int first,
                                               uint32_t (&bytes)[kLoads][4]) {
  keys.load(slot, first, bytes);
}

// Left operands, as cached and as multiplied; they stay until the products have been waited for.
template <class Shape>
struct Operands {
  uint32_t bytes[Shape::kLoads][4];
  uint32_t fragments[Shape::kScoreBuffers][Shape::kProducts][4];
};

// Products of kCount steps of fp8 columns from step kFirst on; the next bytes are fetched, and become operands, while
// the products before them run. `operands.bytes`: of the first step;
// then of the step behind the last, if there is one.
template <int kFirst, int kCount, int kAll, class Shape, class Keys>
__device__ __forceinline__ void multiply(const Keys& keys, uint32_t slot, uint32_t queries, Operands<Shape>& operands,
                                         dense::Scores<Shape>& score) {
  constexpr int kBuffers = Shape::kScoreBuffers, kChunkProducts = dense::kProductColumns / dense::kProductDepth;
  auto& [bytes, fragments] = operands;
#pragma unroll
  for (int step = 0; step < kCount; ++step) {
    if (step >= kBuffers) ptx::wgmma_wait<kBuffers - 1>();
    dense::expand_keys(bytes, fragments[step % kBuffers]);
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
  Operands<Shape> operands;
  keys.load(slot, 0, operands.bytes);
  multiply<0, kSteps, kSteps, Shape>(keys, slot, queries, operands, score);
  ptx::mbarrier_arrive_warp(empty);
  ptx::wgmma_wait<0>();
}

// A quarter of the latent columns, and then all sums so far relative to the next quarter's scales.
template <int kQuarter, class Shape>
__device__ __forceinline__ void score_quarter(const Keys<DsMla>& keys, uint32_t slot, uint32_t queries,
                                              Operands<Shape>& operands, dense::Scores<Shape>& score) {
  constexpr int kAll = kLatent / dense::kProductDepth / Shape::kProducts, kSteps = kAll / DsMla::kScales;
  multiply<kQuarter * kSteps, kSteps, kAll, Shape>(keys, slot, queries, operands, score);
  const uint32_t scales = slot + keys.token() + DsMla::kScaleOffset;
  const float factor[2] = {ScaleBits(scales).factor<kQuarter + 1>(),
                           ScaleBits(scales + 8 * DsMla::kStride).factor<kQuarter + 1>()};
  ptx::wgmma_wait<0>();
  ptx::hold(score);
#pragma unroll
  for (int i = 0; i < Shape::kRows / 2; ++i) score[i] *= factor[i / 2 % 2];
  ptx::hold(score);
}

template <class Shape>
__device__ __forceinline__ void score_block(const Keys<DsMla>& keys, uint32_t slot, uint32_t empty, uint32_t queries,
                                            TokenScales& scales, dense::Scores<Shape>& score) {
  Operands<Shape> operands;
  keys.load(slot, 0, operands.bytes);
  score_quarter<0, Shape>(keys, slot, queries, operands, score);
  score_quarter<1, Shape>(keys, slot, queries, operands, score);
  score_quarter<2, Shape>(keys, slot, queries, operands, score);
  score_quarter<3, Shape>(keys, slot, queries, operands, score);
  // The rope keys are bf16, as the product's left operand wants them.
  constexpr int kProducts = kRope / dense::kProductDepth;
  constexpr int kFirstLoad = DsMla::kRopeOffset / 16;
  uint32_t rope[kProducts][4];
#pragma unroll
  for (int i = 0; i < kProducts; ++i) ptx::ldmatrix_x4(rope[i], slot + keys.line + (kFirstLoad + 2 * i) * 16);
  const uint32_t rope_queries = queries + kLatent / dense::kProductColumns * Shape::kQueryChunkBytes / 16;
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    ptx::register_wgmma<DsMla::RopeElement>(score, rope[i], rope_queries + i * 32 / 16, true);
  }
  ptx::wgmma_commit();
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
};

}  // namespace mla::sparse_sm90::fp8
