// A few neighbouring elements at a time: read and written in the widest accesses, converted from one type to another.
#pragma once

#include <cuda_runtime.h>

#include <cstring>
#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/ptx.cuh"

namespace mla {

using ptx::store_words;

// Bits of a group of any type, as accesses bring them: 4, 8 or 16 bytes.
template <class Element, int kCount>
struct GroupBits {
  static constexpr int kWords = kCount * sizeof(Element) / 4;
  uint32_t words[kWords];
};

// As many elements as fill an access of the wider type.
template <class First, class Second>
constexpr int kWidestGroup = 16 / (sizeof(First) > sizeof(Second) ? sizeof(First) : sizeof(Second));

template <class Element, int kCount>
__device__ __forceinline__ GroupBits<Element, kCount> load_group(const void* source) {
  using Words = std::conditional_t<kCount * sizeof(Element) == 16, uint4,
                                   std::conditional_t<kCount * sizeof(Element) == 8, uint2, uint32_t>>;
  GroupBits<Element, kCount> bits;
  static_assert(sizeof(bits) == sizeof(Words));
  const Words words = __ldg(static_cast<const Words*>(source));
  memcpy(&bits, &words, sizeof(words));
  return bits;
}

template <class Element, int kCount>
__device__ __forceinline__ void store_group(void* target, const GroupBits<Element, kCount>& bits) {
  const uint32_t* words = bits.words;
  if constexpr (sizeof(bits) == 4) {
    *static_cast<uint32_t*>(target) = words[0];
  } else if constexpr (sizeof(bits) == 8) {
    *static_cast<uint2*>(target) = make_uint2(words[0], words[1]);
  } else {
    store_words(target, words[0], words[1], words[2], words[3]);
  }
}

template <class Element, int kCount>
__device__ __forceinline__ float element_at(const GroupBits<Element, kCount>& bits, int i) {
  constexpr int kPerWord = 4 / sizeof(Element);
  const uint32_t packed = bits.words[i / kPerWord], word = packed >> (i % kPerWord * 8 * sizeof(Element));
  if constexpr (std::is_same_v<Element, float>) {
    return __uint_as_float(word);
  } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __uint_as_float(i % kPerWord == 0 ? packed << 16 : packed & 0xFFFF0000);  // in one instruction
  } else if constexpr (std::is_same_v<Element, __half>) {
    return to_float(__ushort_as_half(static_cast<uint16_t>(word)));
  } else {
    return to_float(Element{static_cast<uint8_t>(word)});
  }
}

// Values times `multiply`.
template <class Element, int kCount>
__device__ __forceinline__ void to_floats(const GroupBits<Element, kCount>& bits, float multiply, float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = element_at(bits, i) * multiply;
}

#if __CUDA_ARCH__ >= 890
// By the instruction for two of them.
template <int kCount>
__device__ __forceinline__ void to_floats(const GroupBits<E4M3FN, kCount>& bits, float multiply, float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const float2 two = __half22float2(ptx::e4m3fn_to_half(static_cast<uint16_t>(bits.words[i / 4] >> (i % 4 * 8))));
    x[i] = two.x * multiply;
    x[i + 1] = two.y * multiply;
  }
}
#endif

template <class Element, int kCount>
__device__ __forceinline__ GroupBits<Element, kCount> from_floats(const float (&x)[kCount], bool saturate) {
  GroupBits<Element, kCount> bits;
#pragma unroll
  for (int word = 0; word < GroupBits<Element, kCount>::kWords; ++word) {
    const float* four = x + word * (4 / sizeof(Element));
    if constexpr (std::is_same_v<Element, float>) {
      bits.words[word] = __float_as_uint(four[0]);
    } else if constexpr (std::is_same_v<Element, E4M3FN>) {
      bits.words[word] = e4m3fn_pair(four[0], four[1], saturate) | uint32_t{e4m3fn_pair(four[2], four[3], saturate)}
                                                                       << 16;
    } else if constexpr (std::is_same_v<Element, E4M3FNUZ>) {
      bits.words[word] = e4m3fnuz_bits(four[0], saturate) | uint32_t{e4m3fnuz_bits(four[1], saturate)} << 8 |
                         uint32_t{e4m3fnuz_bits(four[2], saturate)} << 16 |
                         uint32_t{e4m3fnuz_bits(four[3], saturate)} << 24;
    } else {
      bits.words[word] = pack<Element>(four[0], four[1]);
    }
  }
  return bits;
}

}  // namespace mla
