// How the caches' tokens become 16-bit elements in LDS, eight of them by a wave: the loads of 16 bytes a lane that
// bring them into registers, and what is written to LDS from there.
#pragma once

#include "kernels/decode/gfx9/shape.h"

namespace mla::gfx9 {

constexpr int kWaveTokens = 8;  // that a wave loads
constexpr int kScaleGroups = kLatent / kDsMlaGroup;

// So many bytes into the row of a token, which each lane has one of. Of rows with one base the address is a scalar one
// and an offset that never changes.
template <class Rows>
__device__ __forceinline__ U32x4 load_lanes(const Rows& rows, int token, uint32_t bytes) {
  const unsigned char* source;
  if constexpr (Rows::kOneBase)
    source = rows.base(0) + (rows.offset(token) + bytes);
  else
    source = rows.of_lane(token) + bytes;
  return *reinterpret_cast<const U32x4*>(source);
}

// Elements as the products take them: one load for the latent columns of each token, one for the rope of all.
struct PlainFormat {
  static constexpr bool kScaled = false;
  static constexpr int kTokenBytes = 2 * kWidth;
  static constexpr int kLoads = kWaveTokens + 1;

  // The rope's part of lane l, in token l / 8: what lies in LDS as its chunk l % 8.
  static __device__ __forceinline__ uint32_t rope_offset(int lane) { return 2 * kLatent + (lane % 8 ^ lane / 8) * 16; }

  template <class Rows>
  static __device__ __forceinline__ U32x4 load(const Rows& rows, int lane, int i) {
    if (i == kWaveTokens) return load_lanes(rows, lane / 8, rope_offset(lane));
    return *reinterpret_cast<const U32x4*>(rows.base(i) + (lane * 16 + rows.offset(i)));
  }

  // What all loads together need before they are stored.
  static __device__ __forceinline__ void prepare(U32x4 (&)[kLoads]) {}

  // `first`: the wave's first token in the block.
  template <class Shared>
  static __device__ __forceinline__ void store(Shared&, Block& block, int first, int i, int lane, U32x4 part) {
    unsigned char* target = i < kWaveTokens ? block.latent[first + i] : block.rope[first];
    *reinterpret_cast<U32x4*>(target + lane * 16) = part;
  }
};

// Two 8-bit codes of the architecture's own type as 16-bit elements, which hold them exactly.
template <class Element, bool kHigh>
__device__ __forceinline__ uint32_t unpack_two(uint32_t four) {
#if defined(__gfx950__)
  if constexpr (std::is_same_v<Element, BF16>)
    return bits_as<uint32_t>(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(four, 1.0f, kHigh));
  else
    return bits_as<uint32_t>(__builtin_amdgcn_cvt_scalef32_pk_f16_fp8(four, 1.0f, kHigh));
#else
  const F32x2 two = native_e4m3_to_float<kHigh>(four);
  if constexpr (std::is_same_v<Element, BF16>) {
    constexpr uint32_t kHighHalves = 0x07060302;
    return __builtin_amdgcn_perm(bits_as<uint32_t>(static_cast<float>(two.y)),
                                 bits_as<uint32_t>(static_cast<float>(two.x)), kHighHalves);
  } else {
    return bits_as<uint32_t>(__builtin_amdgcn_cvt_pkrtz(two.x, two.y));
  }
#endif
}

template <class Element>
__device__ __forceinline__ U32x4 unpack_eight(uint32_t left, uint32_t right) {
  return {unpack_two<Element, false>(left), unpack_two<Element, true>(left), unpack_two<Element, false>(right),
          unpack_two<Element, true>(right)};
}

// Sixteen codes to sixteen elements.
template <class Element>
__device__ __forceinline__ void store_unpacked(unsigned char* target, U32x4 codes) {
  auto* eights = reinterpret_cast<U32x4*>(target);
  eights[0] = unpack_eight<Element>(codes.x, codes.y);
  eights[1] = unpack_eight<Element>(codes.z, codes.w);
}

// Latent columns of 8-bit codes: two tokens a load.
struct CodeLoads {
  static constexpr int kLoads = kWaveTokens / 2;

  template <class Rows>
  static __device__ __forceinline__ U32x4 load(const Rows& rows, int lane, int i) {
    if constexpr (Rows::kOneBase)
      return load_lanes(rows, 2 * i + lane / 32, lane % 32 * 16);
    else
      return *reinterpret_cast<const U32x4*>(rows.one_of(2 * i, lane >= 32) + lane % 32 * 16);
  }
  static __device__ __forceinline__ unsigned char* target(Block& block, int first, int i, int lane) {
    return block.latent[first + 2 * i + lane / 32] + lane % 32 * 32;
  }
};

// The architecture's own e4m3, one scale for all. Of the rope's 16 bytes two lanes have the same, and each takes eight.
template <class Element>
struct CodeFormat {
  static constexpr bool kScaled = false;
  static constexpr int kTokenBytes = kWidth;
  static constexpr int kLoads = CodeLoads::kLoads + 1;

  template <class Rows>
  static __device__ __forceinline__ U32x4 load(const Rows& rows, int lane, int i) {
    if (i < CodeLoads::kLoads) return CodeLoads::load(rows, lane, i);
    return load_lanes(rows, lane / 8, kLatent + lane % 8 / 2 * 16);
  }
  static __device__ __forceinline__ void prepare(U32x4 (&)[kLoads]) {}

  template <class Shared>
  static __device__ __forceinline__ void store(Shared&, Block& block, int first, int i, int lane, U32x4 part) {
    if (i < CodeLoads::kLoads) {
      store_unpacked<Element>(CodeLoads::target(block, first, i, lane), part);
      return;
    }
    const uint32_t left = lane % 2 == 0 ? part.x : part.z, right = lane % 2 == 0 ? part.y : part.w;
    unsigned char* target = block.rope[first + lane / 8] + Block::rope_place(lane / 8, lane % 8);
    *reinterpret_cast<U32x4*>(target) = unpack_eight<Element>(left, right);
  }
};

// fp8_ds_mla: OCP e4m3 with a scale for each 128 columns, and bf16 rope. The codes become bf16 without their scales,
// which go to the scores and the weights. gfx942 reads codes as its own type, whose values are half as large.
struct DsMlaFormat {
  static constexpr bool kScaled = true;
  static constexpr int kTokenBytes = kDsMlaBytes;
  static constexpr int kRopeLoad = CodeLoads::kLoads, kScaleLoad = kRopeLoad + 1;
  static constexpr int kLoads = kScaleLoad + 1;

  template <class Rows>
  static __device__ __forceinline__ U32x4 load(const Rows& rows, int lane, int i) {
    if (i < CodeLoads::kLoads) return CodeLoads::load(rows, lane, i);
    if (i == kScaleLoad) return load_lanes(rows, lane / 8, kLatent);  // in eight lanes alike
    return load_lanes(rows, lane / 8, kLatent + kScaleGroups * 4 + (lane % 8 ^ lane / 8) * 16);
  }

  static __device__ __forceinline__ void prepare(U32x4 (&parts)[kLoads]) {
    if constexpr (kGfx950) return;
    uint32_t differ = 0;
#pragma unroll
    for (int i = 0; i < CodeLoads::kLoads; ++i) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const uint32_t codes = parts[i][word], magnitudes = codes & ~kSigns;
        differ |= (codes & (kSigns - magnitudes)) | (magnitudes + kOnes);  // -0, NaN
      }
    }
    if (!any_lane((differ & kSigns) != 0)) return;
#pragma unroll
    for (int i = 0; i < CodeLoads::kLoads; ++i) {
#pragma unroll
      for (int word = 0; word < 4; ++word) parts[i][word] = own_codes(parts[i][word]);
    }
  }

  template <class Shared>
  static __device__ __forceinline__ void store(Shared& shared, Block& block, int first, int i, int lane, U32x4 part) {
    if (i < CodeLoads::kLoads) {
      store_unpacked<BF16>(CodeLoads::target(block, first, i, lane), part);
    } else if (i == kRopeLoad) {
      *reinterpret_cast<U32x4*>(block.rope[first] + lane * 16) = part;
    } else if (lane % 8 == 0) {
#pragma unroll
      for (int group = 0; group < kScaleGroups; ++group) {
        const float scale = bits_as<float>(static_cast<uint32_t>(part[group]));
        shared.key_scales[group][first + lane / 8] = kGfx950 ? scale : 2 * scale;
      }
    }
  }

 private:
  static constexpr uint32_t kSigns = 0x80808080, kOnes = 0x01010101;

  // Four OCP codes, where gfx942's type differs by more than a factor: -0 is 0, and NaN is 0x80. Few have either.
  static __device__ __forceinline__ uint32_t own_codes(uint32_t codes) {
    const uint32_t magnitudes = codes & ~kSigns;
    const uint32_t zeros = ~(magnitudes + ~kSigns) & kSigns;
    const uint32_t nans = (magnitudes + kOnes) & kSigns;
    const uint32_t nan_bytes = nans | (nans - (nans >> 7));
    return (codes & ~zeros & ~nan_bytes) | nans;
  }
};

}  // namespace mla::gfx9
