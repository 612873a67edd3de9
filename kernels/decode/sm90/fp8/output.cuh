// The output warps: O^T += V^T P^T, V^T being the latent of the block's keys, transposed on its way through registers.
// Each of the two warpgroups owns every other chunk of 64 columns.
//
// ldmatrix transposes pairs of bytes: lane 4 * g + t gets of eight tokens the 2t-th and the (2t+1)-th, columns 2g and
// 2g + 1. Of the product's left operand it brings rows g and g + 8, and those are the columns 2g and 2g + 1 here: of
// the sixteen columns of warp w, lane 4 * g + t has 16w + 2g in out[i][4j], out[i][4j+1] with the rows 8j + 2t and 8j +
// 2t + 1, and column 16w + 2g + 1 in out[i][4j+2], out[i][4j+3].
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/decode/sm90/fp8/instructions.cuh"
#include "kernels/decode/sm90/fp8/shape.h"
#include "kernels/decode/sm90/rescale.cuh"

namespace mla::sm90::fp8 {

template <class Shape>
using Output = float[kGroupChunks][Shape::kRows / 2];

constexpr int kChunkLoads = kBlockTokens / 32;

struct Values {
  // This lane's line of a slot: of the token it addresses, the sixteen columns of its warp in the group's first chunk.
  // The group's next chunk is one chunk of 128 columns on.
  static __device__ __forceinline__ uint32_t line(int group, int warp) {
    const int lane = threadIdx.x % 32, line = lane % 8, unit = kGroupWarps * group + warp;
    return lane / 8 * kLatentGroupBytes + line * kLineBytes + ((unit ^ line) << 4);
  }

  // From there, by 32 tokens at a time through the tokens of the group's first chunk, then of its second, and so on.
  static __host__ __device__ constexpr int offset(int load) {
    return load / kChunkLoads * kChunkBytes + load % kChunkLoads * 4 * kLatentGroupBytes;
  }

  // From the weights for the first of the group's chunks to those for its `chunk`-th.
  static __host__ __device__ constexpr int weight_offset(int /*chunk*/) { return 0; }

  // Whether tokens that some row must not see are cleared here: docs/hopper.md, "Masks".
  static constexpr bool kClears = true;

  // What values of a wide tile are multiplied by on their way into the products: nothing here. `slot`: its address;
  // `chunk`: of the group's.
  static __device__ __forceinline__ void scale(uint32_t /*slot*/, int /*chunk*/, uint32_t (&)[2][4]) {}
};

// Bytes of 32 tokens at 16 columns a warp, and more tokens.
template <class Values, int kLoads>
__device__ __forceinline__ void load_value_bytes(uint32_t line, int first, uint32_t (&bytes)[kLoads][4]) {
#pragma unroll
  for (int i = 0; i < kLoads; ++i) ptx::ldmatrix_x4_trans(bytes[i], line + Values::offset(first + i));
}

template <int kLoads>
__device__ __forceinline__ void expand_values(const uint32_t (&bytes)[kLoads][4],
                                              uint32_t (&fragments)[2 * kLoads][4]) {
#pragma unroll
  for (int i = 0; i < 2 * kLoads; ++i) {
    const uint32_t first = ptx::unzip_bytes(bytes[i / 2][i % 2 * 2]);
    const uint32_t second = ptx::unzip_bytes(bytes[i / 2][i % 2 * 2 + 1]);
    fragments[i][0] = ptx::f16_from_e4m3_low(first);
    fragments[i][1] = ptx::f16_from_e4m3_high(first);
    fragments[i][2] = ptx::f16_from_e4m3_low(second);
    fragments[i][3] = ptx::f16_from_e4m3_high(second);
  }
}

// Without the bytes that are NaN.
__device__ __forceinline__ uint32_t without_nan(uint32_t bytes) {
  const uint32_t nan = ((bytes & 0x7F7F7F7F) + 0x01010101) >> 7 & 0x01010101;
  return bytes & ~(nan * 0xFF);
}

// Zeros for this group's values where a weight of 0 would not silence them: of tokens behind the request's last all, of
// those that some rows do not see what is NaN. (A row that does see such a token has NaN among its weights.) `slot`: of
// kTokens tokens; `tokens`, `visible`: BlockInfo's, from its first.
template <int kTokens = kBlockTokens>
__device__ __forceinline__ void clear_values(uint32_t slot, int32_t tokens, int32_t visible, int group) {
  constexpr int kUnits = kProductColumns / 16;  // of a chunk's line, those of the group
#pragma unroll 1
  for (int i = threadIdx.x % kGroupThreads; i < kTokens * kLatentChunks * kUnits; i += kGroupThreads) {
    const int unit = kUnits * group + i % kUnits, chunk = i / kUnits % kLatentChunks;
    const int token = i / kUnits / kLatentChunks, line = token % kGroupTokens;
    if (token < visible) continue;
    const uint32_t address = slot + token / kGroupTokens * kLatentGroupBytes + chunk * kChunkBytes + line * kLineBytes +
                             ((unit ^ line) << 4);
    uint4 values{};
    if (token < tokens) {
      values = ptx::load_shared_16(address);
      values = {without_nan(values.x), without_nan(values.y), without_nan(values.z), without_nan(values.w)};
    }
    ptx::store_shared_16(address, values);
  }
  ptx::fence_async_proxy();  // before the copy engine writes there again
}

// The same, and the compiler knows that all lanes have it: what follows from it stays in uniform registers.
__device__ __forceinline__ BlockInfo uniform(const BlockInfo& info) {
  return {__shfl_sync(0xFFFFFFFF, info.tokens, 0), __shfl_sync(0xFFFFFFFF, info.visible, 0),
          __shfl_sync(0xFFFFFFFF, info.flags, 0)};
}

// Two neighbouring columns at once.
__device__ __forceinline__ void store_pair(float* target, float first, float second) {
  *reinterpret_cast<float2*>(target) = {first, second};
}
template <class Target>
__device__ __forceinline__ void store_pair(Target* target, float first, float second) {
  *reinterpret_cast<uint32_t*>(target) = pack<Target>(first, second);
}

// Normalised, to the rows that exist.
template <class Target, class Shape>
__device__ __forceinline__ void store_output(Target* target, int32_t rows, const float* inverse, int group, int warp,
                                             const Output<Shape>& out) {
  const int lane = threadIdx.x % 32, g = lane / 4, first_row = lane % 4 * 2;
  target += first_row * kLatent + group * kProductColumns + warp * 16 + 2 * g;
  inverse += first_row;
  rows -= first_row;
#pragma unroll
  for (int j = 0; j < Shape::kRowGroups; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = j * 8 + e;
      if (row >= rows) continue;
      const float factor = inverse[row];
#pragma unroll
      for (int i = 0; i < kGroupChunks; ++i) {
        store_pair(target + row * kLatent + i * kLineBytes, out[i][4 * j + e] * factor, out[i][4 * j + 2 + e] * factor);
      }
    }
  }
}

template <class Shape, class Params>
__device__ __forceinline__ void store_tile(const Params& p, const Control<Shape>& control, int group, int warp,
                                           const Output<Shape>& out) {
  const int32_t rows = control.finished.rows, partial = control.finished.partial;
  if (partial >= 0) {
    store_output<float, Shape>(
        p.partial_out + partial_row(p, partial, control.finished.first_row, Shape::kRows) * kLatent, rows,
        control.inverse, group, warp, out);
  } else if (p.out_dtype == DType::kF16) {
    store_output<__half, Shape>(static_cast<__half*>(p.out) + control.finished.first_row * kLatent, rows,
                                control.inverse, group, warp, out);
  } else {
    store_output<__nv_bfloat16, Shape>(static_cast<__nv_bfloat16*>(p.out) + control.finished.first_row * kLatent, rows,
                                       control.inverse, group, warp, out);
  }
}

// `Values`: how a warp reads a block, and which weights belong to which of its columns.
template <class Shape, class Values, class Params>
__device__ __forceinline__ void accumulate_tiles(const Params& p, uint32_t base, Control<Shape>& control) {
  const int thread = threadIdx.x - Shape::kScoreThreads;
  const int group = __shfl_sync(0xFFFFFFFF, thread / kGroupThreads, 0);
  const int warp = __shfl_sync(0xFFFFFFFF, thread / 32 % kGroupWarps, 0);  // of the group
  const uint32_t full = ptx::shared_address(control.full), empty = ptx::shared_address(control.empty);
  const uint32_t weights_full = ptx::shared_address(control.weights_full);
  const uint32_t weights_empty = ptx::shared_address(control.weights_empty);
  const uint32_t all_weights = ptx::matrix_operand(base + Shape::kWeightOffset);
  const uint32_t line = Values::line(group, warp);
  Ring<Shape> position;
  uint32_t weights_parity = 0;  // of each buffer's next use, a bit each
  uint32_t item_parity = 0;
  int buffer = 0;
  Output<Shape> out = {};

  for (;; position.advance()) {
    ptx::mbarrier_wait(full + position.slot * 8, position.parity);
    const BlockInfo info = uniform(control.blocks[position.slot]);
    if (info.flags & kStop) break;
    const uint32_t slot = base + position.slot * Shape::kSlotBytes;
    if (Values::kClears && info.visible < kBlockTokens) {
      // Not before the scores are made of what is cleared.
      ptx::mbarrier_wait(weights_full + buffer * 8, weights_parity >> buffer & 1);
      clear_values(slot, info.tokens, info.visible, group);
      ptx::barrier_sync(kOutputBarrier + group, kGroupThreads);
    }

    // The first values are ready before the weights are.
    constexpr int kChunkProducts = kBlockTokens / kProductDepth;
    constexpr int kSteps = kGroupChunks * kChunkProducts / Shape::kProducts;
    constexpr int kLoads = Shape::kLoads, kBuffers = Shape::kOutputBuffers;
    uint32_t bytes[kLoads][4], fragments[kBuffers][Shape::kProducts][4];
    load_value_bytes<Values>(slot + line, 0, bytes);
    expand_values(bytes, fragments[0]);
    ptx::mbarrier_wait(weights_full + buffer * 8, weights_parity >> buffer & 1);
    weights_parity ^= 1u << buffer;
    if (control.rescaled[buffer]) rescale_output(control.rescale[buffer], out);
    const uint32_t weights = all_weights + buffer * Shape::kWeightBytes / 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) load_value_bytes<Values>(slot + line, (step + 1) * kLoads, bytes);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < Shape::kProducts; ++i) {
        const int product = step * Shape::kProducts + i;
        ptx::register_wgmma(
            out[product / kChunkProducts], fragments[step % kBuffers][i],
            weights + (Values::weight_offset(product / kChunkProducts) + product % kChunkProducts * 32) / 16, true);
      }
      ptx::wgmma_commit();
      if (step + 1 < kSteps) {
        if (step + 1 >= kBuffers) ptx::wgmma_wait<kBuffers - 1>();
        expand_values(bytes, fragments[(step + 1) % kBuffers]);
      }
    }
    ptx::mbarrier_arrive_warp(empty + position.slot * 8);
    ptx::wgmma_wait<0>();
    ptx::mbarrier_arrive_warp(weights_empty + buffer * 8);
    buffer ^= 1;

    if (info.flags & kLast) {
      ptx::mbarrier_wait(ptx::shared_address(&control.sums_full), item_parity);
      item_parity ^= 1;
      store_tile<Shape>(p, control, group, warp, out);
      ptx::mbarrier_arrive_warp(ptx::shared_address(&control.sums_empty));
      buffer = 0;
#pragma unroll
      for (int i = 0; i < kGroupChunks; ++i) {
#pragma unroll
        for (int j = 0; j < Shape::kRows / 2; ++j) out[i][j] = 0;
      }
    }
  }
}

}  // namespace mla::sm90::fp8
