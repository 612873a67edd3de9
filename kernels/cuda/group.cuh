// Eight neighbouring elements at a time: read and written in the widest accesses, converted from one type to another.
#pragma once

#include <cuda_runtime.h>

#include <cstring>
#include <type_traits>

#include "kernels/cuda/element.cuh"

namespace mla {

constexpr int kGroup = 8;

// Bits of a group of any type, as accesses bring them: one of 16 bytes, two of float, a half of fp8.
template <class Element>
struct GroupBits {
  static constexpr int kWords = kGroup * sizeof(Element) / 4;
  uint32_t words[kWords];
};

// kOnce: nobody reads these bytes again.
template <class Element, bool kOnce = false>
__device__ __forceinline__ GroupBits<Element> load_group(const void* source) {
  GroupBits<Element> bits;
  if constexpr (sizeof(Element) == 1) {
    const auto* address = static_cast<const uint2*>(source);
    const uint2 pair = kOnce ? __ldcs(address) : __ldg(address);
    memcpy(&bits, &pair, sizeof(pair));
  } else {
#pragma unroll
    for (int i = 0; i < GroupBits<Element>::kWords / 4; ++i) {
      const auto* address = static_cast<const uint4*>(source) + i;
      const uint4 four = kOnce ? __ldcs(address) : __ldg(address);
      memcpy(&bits.words[4 * i], &four, sizeof(four));
    }
  }
  return bits;
}

// Spelt out, since the compiler takes some stores of a uint4 apart.
__device__ __forceinline__ void store_words(void* target, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(__cvta_generic_to_global(target)), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

template <class Element>
__device__ __forceinline__ void store_group(void* target, const GroupBits<Element>& bits) {
  if constexpr (sizeof(Element) == 1) {
    *static_cast<uint2*>(target) = make_uint2(bits.words[0], bits.words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < GroupBits<Element>::kWords; i += 4) {
      store_words(static_cast<uint32_t*>(target) + i, bits.words[i], bits.words[i + 1], bits.words[i + 2],
                  bits.words[i + 3]);
    }
  }
}

template <class Element>
__device__ __forceinline__ float element_at(const GroupBits<Element>& bits, int i) {
  constexpr int kPerWord = 4 / sizeof(Element);
  const uint32_t word = bits.words[i / kPerWord] >> (i % kPerWord * 8 * sizeof(Element));
  if constexpr (std::is_same_v<Element, float>) {
    return __uint_as_float(word);
  } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return to_float(__ushort_as_bfloat16(static_cast<uint16_t>(word)));
  } else if constexpr (std::is_same_v<Element, __half>) {
    return to_float(__ushort_as_half(static_cast<uint16_t>(word)));
  } else {
    return to_float(Element{static_cast<uint8_t>(word)});
  }
}

template <class Element>
__device__ __forceinline__ GroupBits<Element> from_floats(const float (&x)[kGroup], bool saturate) {
  GroupBits<Element> bits;
#pragma unroll
  for (int word = 0; word < GroupBits<Element>::kWords; ++word) {
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
