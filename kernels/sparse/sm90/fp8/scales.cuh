// The scales of fp8_ds_mla's tokens, one for each 128 columns: by what scores, weights and values are multiplied.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/sparse/sm90/fp8/layouts.h"

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
  float exponents[2];              // of the power of two
  float inverse[2];                // of it

  // `scales`: where those of row g lie in shared memory.
  __device__ __forceinline__ void load(uint32_t scales) {
    constexpr int kLeast = 127 - 60, kMost = 253;  // whose inverse is a normal float
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const ScaleBits bits(scales + half * 8 * DsMla::kStride);
      const int power = min(max(static_cast<int>(bits.largest >> 23), kLeast) + 1, kMost);  // with a float's bias
      exponents[half] = static_cast<float>(power - 127);
      inverse[half] = __uint_as_float(static_cast<uint32_t>(254 - power) << 23);
#pragma unroll
      for (int i = 0; i < DsMla::kScales; ++i) ratio[i][half] = __uint_as_float(bits.of[i]) * inverse[half];
    }
  }

  __device__ __forceinline__ float exponent(int half) const { return exponents[half]; }
};

// Where a slot of a wide tile has what prepare_scales() made of its tokens' scales. The factors of their scores take
// the place of the scales; the rest is behind the tokens: of each group of 128 columns and lane t the scales of the
// values of tokens 2t and 2t + 1 of each eight, in the order of the products' left operands; then of each token the
// inverse.
struct SlotScales {
  static constexpr int kTokens = 32;
  static constexpr int kValues = kTokens * DsMla::kStride;
  static constexpr int kValueBytes = 4 * 16;  // of a group of columns
  static constexpr int kInverses = kValues + DsMla::kScales * kValueBytes;
  static constexpr int kBytes = kInverses - kValues + kTokens * 4;
};

// In wide tiles scales are multiplied into the values, in fp16: relative to a power of two that leaves the token's
// largest below 2^7. Its products with codes are then below 2^16, and its small scales have the more of fp16's range.
// All of a token's numbers are made here once, by a lane of a warp that has time; made where they are used, by eight
// warps that have none, they took a twentieth of the time.
__device__ __forceinline__ void prepare_scales(uint32_t slot) {
  constexpr int kHeadroom = 7, kLeast = 127 - 60;
  const uint32_t lane = threadIdx.x % 32, scales = slot + lane * DsMla::kStride + DsMla::kScaleOffset;
  const ScaleBits bits(scales);
  ptx::store_shared_16(scales, {__float_as_uint(bits.factor<1>()), __float_as_uint(bits.factor<2>()),
                                __float_as_uint(bits.factor<3>()), __float_as_uint(bits.factor<4>())});
  const int power = max(static_cast<int>(bits.largest >> 23), kLeast) + 1 - kHeadroom;  // with a float's bias
  const uint32_t inverse = static_cast<uint32_t>(254 - power) << 23;
  ptx::store_shared_4(slot + SlotScales::kInverses + lane * 4, inverse);
  const uint32_t values = slot + SlotScales::kValues + lane % 8 / 2 * 16 + lane / 8 * 4 + lane % 2 * 2;
#pragma unroll
  for (int i = 0; i < DsMla::kScales; ++i) {
    ptx::store_shared_half(values + i * SlotScales::kValueBytes,
                           from_float<__half>(__uint_as_float(bits.of[i]) * __uint_as_float(inverse)));
  }
}

// Of tokens g and g + 8 of a warp in a wide tile, as TokenScales.
struct WideTokenScales {
  uint32_t inverses;  // the upper halves of two floats, powers of two, whose lower halves are zeros

  // `slot`: its address; `token`: the number of g in it.
  __device__ __forceinline__ WideTokenScales(uint32_t slot, int token)
      : inverses(ptx::load_shared_4(slot + SlotScales::kInverses + token * 4) >> 16 |
                 ptx::load_shared_4(slot + SlotScales::kInverses + token * 4 + 32)) {}

  __device__ __forceinline__ float inverse(int half) const {
    return __uint_as_float(half == 0 ? inverses << 16 : inverses & 0xFFFF0000);
  }

  __device__ __forceinline__ float exponent(int half) const {
    return static_cast<float>(127 - static_cast<int>(__float_as_uint(inverse(half)) >> 23));
  }

  __device__ __forceinline__ float in_sum(float weight, float sum, int half) const {
    return fmaf(weight, inverse(half), sum);
  }
};

// The factors of two of a lane's tokens, rows g and g + 8 of its warp's sixteen.
struct QuarterFactors {
  uint32_t scales;  // where those of row g lie in shared memory

  template <int kQuarter>
  __device__ __forceinline__ float factor(int half) const {
    return ScaleBits(scales + half * 8 * DsMla::kStride).factor<kQuarter>();
  }
};

// The same where they are prepared.
struct PreparedFactors {
  uint32_t scales;

  template <int kQuarter>
  __device__ __forceinline__ float factor(int half) const {
    return __uint_as_float(ptx::load_shared_4(scales + half * 8 * DsMla::kStride + (kQuarter - 1) * 4));
  }
};

}  // namespace mla::sparse_sm90::fp8
