// The queries of a warp as A fragments, which stay in registers: its rows and its quarter of the columns. Rows that do
// not exist are 0.
#pragma once

#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/decode/generic/fragments.cuh"
#include "kernels/decode/generic/shape.h"
#include "kernels/decode/work.cuh"

namespace mla {

template <class Shape>
using Queries = uint32_t[Shape::kRowFragments][Shape::kSteps][4];

// Where group k of a warp's quarter of a row lies.
template <class Element, class Shape, class Params>
__device__ __forceinline__ const Element* query_group(const Params& p, int64_t row, int k, int quarter) {
  const int column = k * Shape::kKeyStep + quarter * 16;
  if (k * Shape::kKeyStep < kLatent) {
    const int place = k * Shape::kQuarters + quarter;
    return static_cast<const Element*>(p.q_latent) + row * p.q_latent_stride + Shape::column_group(place) * 16;
  }
  return static_cast<const Element*>(p.q_rope) + row * p.q_rope_stride + (column - kLatent);
}

// f(m, half, row, exists) for a lane's rows of its warp's fragments.
template <class Shape, class F>
__device__ __forceinline__ void for_rows(const Tile& tile, int row_group, F f) {
  const int g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int m = 0; m < Shape::kRowFragments; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (row_group * Shape::kRowFragments + m) * 16 + half * 8 + g;
      f(m, half, row, row < tile.rows);
    }
  }
}

// As the cache's 16-bit elements.
template <class Element, class Shape, class Params>
__device__ __forceinline__ void load_queries(const Params& p, const Tile& tile, int row_group, int quarter,
                                             Queries<Shape>& queries) {
  const int t = threadIdx.x % 4;
  for_rows<Shape>(tile, row_group, [&](int m, int half, int row, bool exists) {
#pragma unroll
    for (int k = 0; k < Shape::kSteps; ++k) {
      const int64_t global_row = tile.first_row + (exists ? row : 0);
      const Element* source = query_group<Element, Shape>(p, global_row, k, quarter) + 2 * t;
      queries[m][k][half] = exists ? *reinterpret_cast<const uint32_t*>(source) : 0;
      queries[m][k][half + 2] = exists ? *reinterpret_cast<const uint32_t*>(source + 8) : 0;
    }
  });
}

// As halves, in the order of columns that fragments.cuh gives fp8 keys.
//
// bf16 reaches further than a half: a row's quarter is scaled by the power of two that brings its largest element near
// the end of the range, and what is rounded or lost then is 2^-38 of that. The scale's inverse is applied to the
// scores.
template <class Shape, class Params>
__device__ __forceinline__ void load_queries_as_halves(const Params& p, const Tile& tile, int row_group, int quarter,
                                                       bool writes_scale, SharedMemory<Shape>& shared,
                                                       Queries<Shape>& queries) {
  const int t = threadIdx.x % 4;
  // One branch around all loads, so that they are on their way together.
  if (p.q_dtype == DType::kE4M3FN) {
    for_rows<Shape>(tile, row_group, [&](int m, int half, int row, bool exists) {
#pragma unroll
      for (int k = 0; k < Shape::kSteps; ++k) {
        const auto* source = query_group<E4M3FN, Shape>(p, tile.first_row + (exists ? row : 0), k, quarter) + 4 * t;
        queries[m][k][half] = exists ? *reinterpret_cast<const uint32_t*>(source) : 0;
      }
    });
    for_rows<Shape>(tile, row_group, [&](int m, int half, int, bool) {
#pragma unroll
      for (int k = 0; k < Shape::kSteps; ++k) {
        const uint32_t bytes = queries[m][k][half];
        const uint32_t nan = (bytes & 0x7F7F7F7F) + 0x01010101;  // the highest bit of each byte
        queries[m][k][half] = odd_by_shifts(bytes << 8) | (nan & 0x00800080) * 0xFF;
        queries[m][k][half + 2] = odd_by_shifts(bytes) | (nan >> 8 & 0x00800080) * 0xFF;
      }
    });
  } else {
    for_rows<Shape>(tile, row_group, [&](int m, int half, int row, bool exists) {
#pragma unroll
      for (int k = 0; k < Shape::kSteps; ++k) {
        const auto* source = query_group<uint16_t, Shape>(p, tile.first_row + (exists ? row : 0), k, quarter) + 4 * t;
        const uint2 four = exists ? *reinterpret_cast<const uint2*>(source) : uint2{};
        queries[m][k][half] = __byte_perm(four.x, four.y, 0x5410);
        queries[m][k][half + 2] = __byte_perm(four.x, four.y, 0x7632);
      }
    });
  }
  for_rows<Shape>(tile, row_group, [&](int m, int half, int row, bool) {
    float inverse = 1;
    if (p.q_dtype == DType::kBF16) {
      uint32_t largest = 0;
#pragma unroll
      for (int k = 0; k < Shape::kSteps; ++k) {
        largest = __vmaxu2(largest, __vmaxu2(queries[m][k][half] & 0x7FFF7FFF, queries[m][k][half + 2] & 0x7FFF7FFF));
      }
      largest = max(largest & 0xFFFF, largest >> 16);
      largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
      largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
      const uint32_t exponent = max(largest >> 7, 20u);                      // so that both scales are normal floats
      const float scale = __uint_as_float((2 * 127 + 14 - exponent) << 23);  // the largest is then 2^14 or more
      inverse = __uint_as_float((exponent - 14) << 23);
#pragma unroll
      for (int k = 0; k < Shape::kSteps; ++k) {
#pragma unroll
        for (int i = half; i < 4; i += 2) {
          uint32_t& pair = queries[m][k][i];
          pair = pack<__half>(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xFFFF0000) * scale);
        }
      }
    }
    if (writes_scale && t == 0) shared.query_scale[row][quarter] = inverse;
  });
}

}  // namespace mla
