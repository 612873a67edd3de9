// How a block of cached tokens comes into shared memory, by the layout of the cache.
#pragma once

#include <cstdint>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/decode/generic/fragments.cuh"
#include "kernels/decode/generic/shape.h"

namespace mla {

// Where registers are short, asked for anew, so that nothing that follows from it is kept through the loop over keys.
template <class Shape>
__device__ __forceinline__ int thread_number() {
  return Shape::kRows < 64 ? static_cast<int>(threadIdx.x) : ptx::thread_index();
}

// Starts the copy of a block's tokens; masked ones become zeros, so that 0 * NaN never meets the output.
template <class Shape>
__device__ __forceinline__ void load_block(const unsigned char* layer, uint32_t block, const int32_t* slots) {
  constexpr int kLanes = Shape::kCopyLanes;
  constexpr int kTokensAtOnce = Shape::kThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int first = 0; first < Shape::kTokens; first += kTokensAtOnce) {
    const int token = first + static_cast<int>(threadIdx.x) / kLanes;
    if (Shape::kTokens % kTokensAtOnce != 0 && token >= Shape::kTokens) break;
    const int32_t slot = slots[token];
    const bool valid = slot >= 0;
    const unsigned char* source = layer + int64_t{valid ? slot : 0} * Shape::kTokenBytes + lane * 16;
    const uint32_t target = block + token * Shape::kTokenBytes + ((lane ^ Shape::swizzle(token)) << 4);
#pragma unroll
    for (int i = 0; i < Shape::kTokenChunks / kLanes; ++i) {
      ptx::cp_async_16(target + i * kLanes * 16, source + i * kLanes * 16, valid);
    }
  }
}

// A cache whose elements the fragments read as they lie: the ring holds blocks, and a block is ready when it is here.
template <class Cached, class Shape>
struct Tokens {
  static constexpr int64_t kTokenBytes = Shape::kTokenBytes;
  static constexpr int kStageBytes = Shape::kBlockBytes;
  static constexpr int kOtherBytes = 0;

  static __device__ __forceinline__ void load(const unsigned char* layer, uint32_t stage, const int32_t* slots) {
    load_block<Shape>(layer, stage, slots);
  }
};

struct DsMla {};

// fp8_ds_mla: the ring holds tokens as they are cached, 656 bytes. A block's codes become bf16, which holds them
// exactly, in one buffer behind the ring, and its scales come beside it: they go to the scores and the weights.
template <class Shape>
struct Tokens<DsMla, Shape> {
  static constexpr int64_t kTokenBytes = kDsMlaBytes;
  static constexpr int kChunks = kDsMlaBytes / 16;
  static constexpr int kStageBytes = Shape::kTokens * kDsMlaBytes;
  static constexpr int kScaleBytes = Shape::kQuarters * Shape::kTokens * 4;
  static constexpr int kOtherBytes = Shape::kBlockBytes + kScaleBytes;
  static constexpr int kRopeAt = kDsMlaBytes - kRope * 2;

  static __device__ __forceinline__ void load(const unsigned char* layer, uint32_t stage, const int32_t* slots) {
    constexpr int kUnrolled = Shape::kRows == 64 ? 1 : 4;
#pragma unroll(kUnrolled)
    for (int i = thread_number<Shape>(); i < Shape::kTokens * kChunks; i += Shape::kThreads) {
      const int token = i / kChunks, chunk = i % kChunks;
      const int32_t slot = slots[token];
      const bool valid = slot >= 0;
      ptx::cp_async_16(stage + i * 16, layer + int64_t{valid ? slot : 0} * kDsMlaBytes + chunk * 16, valid);
    }
  }

  // `block` is Shape's, with the columns in its order; `scales` [quarters][tokens].
  static __device__ __forceinline__ void unpack(const unsigned char* stage, unsigned char* block, float* scales) {
    constexpr int kGroup = 8, kGroups = kWidth / kGroup, kLatentGroups = kLatent / kGroup;  // of columns
    const int thread = thread_number<Shape>();
    constexpr int kUnrolled = Shape::kRows == 64 ? 1 : 2;  // where registers are short
#pragma unroll(kUnrolled)
    for (int i = thread; i < Shape::kTokens * kGroups; i += Shape::kThreads) {
      const int token = i / kGroups, chunk = i % kGroups;
      // The chunk of a latent column, as it lies in the block.
      const unsigned char* source = stage + token * kDsMlaBytes;
      uint4 bits;
      if (chunk < kLatentGroups) {
        const uint2 codes =
            *reinterpret_cast<const uint2*>(source + Shape::column_group(chunk / 2) * 16 + chunk % 2 * 8);
        const uint2 left = unpacked(codes.x), right = unpacked(codes.y);
        bits = make_uint4(left.x, left.y, right.x, right.y);
      } else {
        bits = *reinterpret_cast<const uint4*>(source + kRopeAt + (chunk - kLatentGroups) * 16);
      }
      *reinterpret_cast<uint4*>(block + token * Shape::kTokenBytes + ((chunk ^ Shape::swizzle(token)) << 4)) = bits;
    }
    for (int i = thread; i < Shape::kTokens * Shape::kQuarters; i += Shape::kThreads) {
      const int token = i / Shape::kQuarters, quarter = i % Shape::kQuarters;
      scales[quarter * Shape::kTokens + token] =
          reinterpret_cast<const float*>(stage + token * kDsMlaBytes + kLatent)[quarter];
    }
  }

 private:
  // Four e4m3fn codes as bf16. A NaN stays one.
  static __device__ __forceinline__ uint2 unpacked(uint32_t codes) {
#if __CUDA_ARCH__ >= 890
    uint32_t even, odd;
    split_e4m3fn(codes, even, odd);
    const float2 first = __half22float2(reinterpret_cast<const __half2&>(even));
    const float2 second = __half22float2(reinterpret_cast<const __half2&>(odd));
    return make_uint2(pack<__nv_bfloat16>(first.x, second.x), pack<__nv_bfloat16>(first.y, second.y));
#else
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = to_float(E4M3FN{static_cast<uint8_t>(codes >> 8 * i)});
    return make_uint2(pack<__nv_bfloat16>(x[0], x[1]), pack<__nv_bfloat16>(x[2], x[3]));
#endif
  }
};

// What the tensor cores multiply.
template <class Cached>
struct Multiplied {
  using Type = Cached;
};
template <>
struct Multiplied<DsMla> {
  using Type = __nv_bfloat16;
};

// The shape of a tile over this layout.
template <class Cached, int kTileRows, int kTokens>
using ShapeOf =
    DecodeShape<kTileRows, kTokens, sizeof(typename Multiplied<Cached>::Type), std::is_same_v<Cached, DsMla>>;

// A CTA's shared memory.
template <class Cached, class Shape>
constexpr size_t shared_bytes(int stages) {
  return sizeof(SharedMemory<Shape>) + static_cast<size_t>(stages) * Tokens<Cached, Shape>::kStageBytes +
         Tokens<Cached, Shape>::kOtherBytes;
}

}  // namespace mla
