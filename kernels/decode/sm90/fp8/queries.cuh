// An item's queries, in whatever dtype they come, as fp16 lines for the products. By the score warps.
//
// Each row is multiplied by the power of two that brings its largest element into [2^15, 2^16): then bf16 loses nothing
// but of elements 2^-32 below that one, and fp16 and e4m3 nothing. The row's factor takes it back.
//
// Within 16 columns, the pairs 0, 2, 4, 6 come before the pairs 1, 3, 5, 7: ldmatrix hands a lane four neighbouring
// bytes of a key, which are two columns here and two eight further on for the product.
#pragma once

#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/decode/sm90/fp8/instructions.cuh"
#include "kernels/decode/sm90/fp8/shape.h"
#include "kernels/decode/softmax.h"

namespace mla::sm90::fp8 {

// A row's reference is this before its first key: so far down that whatever comes moves it, and finite, so that a
// masked score of -inf still weighs 0 and not NaN.
constexpr float kNoReference = -1e30f;

// A lane's part of a row: 16 columns.
constexpr int kPieceColumns = 16;
constexpr int kRopePieces = kRope / kPieceColumns;
static_assert(kLatent / kPieceColumns == 32, "a lane for each piece of the latent");

template <class Element>
struct Piece {
  static constexpr int kVectors = kPieceColumns * sizeof(Element) / sizeof(uint4);
  uint4 vectors[kVectors];

  __device__ __forceinline__ void load(const Element* source, bool exists) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) vectors[i] = exists ? reinterpret_cast<const uint4*>(source)[i] : uint4{};
  }

  __device__ __forceinline__ uint32_t word(int i) const {
    const uint4& v = vectors[i / 4];
    return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
  }

  // Columns 2i and 2i + 1.
  __device__ __forceinline__ float2 pair(int i) const {
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
      return {__uint_as_float(word(i) << 16), __uint_as_float(word(i) & 0xFFFF0000)};
    } else {
      const uint32_t bits = std::is_same_v<Element, __half> ? word(i)
                            : i % 2 == 0                    ? ptx::f16_from_e4m3_low(word(i / 2))
                                                            : ptx::f16_from_e4m3_high(word(i / 2));
      __half2 halves;
      memcpy(static_cast<void*>(&halves), &bits, sizeof(halves));
      return __half22float2(halves);
    }
  }

  // The bits of the largest magnitude, or of `largest`; of 16-bit elements.
  __device__ __forceinline__ uint32_t largest_bits(uint32_t largest) const {
#pragma unroll
    for (int i = 0; i < kPieceColumns / 2; ++i) largest = max(largest, max(word(i) & 0x7FFF, word(i) >> 16 & 0x7FFF));
    return largest;
  }

  // `column`: the first of the piece. A line holds 64 columns in eight units of 16 bytes.
  template <class Shape>
  __device__ __forceinline__ void store(unsigned char* queries, int row, int column, float multiplier) const {
    unsigned char* line = queries + column / kProductColumns * Shape::kQueryChunkBytes + row * kLineBytes;
    const int unit = column % kProductColumns / 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 values = pair(2 * j + i);
        pairs[j] = pack<__half>(values.x * multiplier, values.y * multiplier);
      }
      *reinterpret_cast<uint4*>(line + (((unit + i) ^ (row % 8)) << 4)) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }

  // This lane's piece of the rope part, in the order of its columns.
  template <class Shape>
  __device__ __forceinline__ void store_in_order(unsigned char* queries, int row, float multiplier) const {
    unsigned char* line = queries + kLatent / kProductColumns * Shape::kQueryChunkBytes + row * kLineBytes;
    const int unit = threadIdx.x % 32 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 values = pair(4 * i + j);
        pairs[j] = pack<typename Shape::RopeElement>(values.x * multiplier, values.y * multiplier);
      }
      *reinterpret_cast<uint4*>(line + (((unit + i) ^ (row % 8)) << 4)) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }
};

// By what a row is multiplied, and what takes that back.
struct RowScale {
  float multiplier, inverse;
};

template <class Element>
__device__ __forceinline__ RowScale scale_of_row(const Piece<Element>& latent, const Piece<Element>& rope) {
  if constexpr (sizeof(Element) == 1) {
    return {128.0f, 1.0f / 128};  // 448 becomes 57,344
  } else {
    constexpr int kInfinity = 255, kTarget = 127 + 15, kMaxExponent = 126;  // of a float, the first two biased
    Piece<Element> largest{};
    largest.vectors[0].x = __reduce_max_sync(0xFFFFFFFF, latent.largest_bits(rope.largest_bits(0)));
    const int exponent = static_cast<int>(__float_as_uint(largest.pair(0).x) >> 23);
    const int shift = min(kTarget - exponent, kMaxExponent);
    return {__uint_as_float(static_cast<uint32_t>(127 + shift) << 23),
            exponent == kInfinity ? NAN : __uint_as_float(static_cast<uint32_t>(127 - shift) << 23)};
  }
}

// All score warps, a row at a time each. Rows behind the tile's are zeros; rows with an infinity or a NaN become NaN
// whole. `scale` takes a product of a query and a stored key to a score in base 2.
template <class Element, class Shape, class Params>
__device__ __forceinline__ void convert_queries(const Params& p, const Tile& tile, float scale, unsigned char* queries,
                                                Control<Shape>& control) {
  constexpr int kWarpRows = (Shape::kRows + Shape::kScoreWarps - 1) / Shape::kScoreWarps;
  constexpr int kBatch = kWarpRows < Shape::kQueryBatch ? kWarpRows : Shape::kQueryBatch;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool has_rope = lane < kRopePieces;
#pragma unroll 1
  for (int first = warp; first < Shape::kRows; first += kBatch * Shape::kScoreWarps) {
    Piece<Element> latent[kBatch], rope[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * Shape::kScoreWarps;
      const int64_t source = tile.first_row + row;
      const bool exists = row < tile.rows;
      latent[i].load(static_cast<const Element*>(p.q_latent) + source * p.q_latent_stride + lane * kPieceColumns,
                     exists);
      rope[i].load(static_cast<const Element*>(p.q_rope) + source * p.q_rope_stride + lane * kPieceColumns,
                   exists && has_rope);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * Shape::kScoreWarps;
      if (row >= Shape::kRows) break;
      const RowScale row_scale = scale_of_row(latent[i], rope[i]);
      latent[i].template store<Shape>(queries, row, lane * kPieceColumns, row_scale.multiplier);
      if constexpr (std::is_same_v<typename Shape::RopeElement, __half>) {
        if (has_rope) rope[i].template store<Shape>(queries, row, kLatent + lane * kPieceColumns, row_scale.multiplier);
      } else {
        if (has_rope) rope[i].template store_in_order<Shape>(queries, row, row_scale.multiplier);
      }
      if (lane == 0) control.factor[row] = scale * row_scale.inverse;
    }
  }
  ptx::fence_async_proxy();
}

// All score warps, when they are done with the item before; a barrier among them has to follow.
template <class Shape, class Params>
__device__ __forceinline__ void take_queries(const Params& p, int32_t layer, unsigned char* queries,
                                             Control<Shape>& control) {
  const Tile tile = control.tile;
  const float k_scale = p.k_scale == nullptr ? 1.0f : p.k_scale[p.k_scales > 1 ? layer : 0];
  const float scale = p.scale * kLog2E * k_scale * (p.q_scale == nullptr ? 1.0f : *p.q_scale);
  switch (p.q_dtype) {
    case DType::kBF16: convert_queries<__nv_bfloat16, Shape>(p, tile, scale, queries, control); break;
    case DType::kF16: convert_queries<__half, Shape>(p, tile, scale, queries, control); break;
    default: convert_queries<E4M3FN, Shape>(p, tile, scale, queries, control);
  }
  const int thread = threadIdx.x;
  if (thread == 0) control.k_scale = k_scale;
  if (thread < Shape::kRows) {
    control.visible_end[thread] = visible_end(p, tile, thread);
    control.reference[thread] = kNoReference;
  }
}

}  // namespace mla::sm90::fp8
