// Eight neighbouring elements at a time: read and written in the widest accesses, as kernels/group.h wants them.
#pragma once

#include "kernels/rocm/device.h"

namespace mla {

constexpr int kGroup = 8;

// Bits of a group of any type, as accesses bring them: one of 16 bytes, two of float, a half of fp8.
template <class Element, int kCount = kGroup>
struct GroupBits {
  static_assert(kCount == kGroup);
  static constexpr int kWords = kGroup * sizeof(Element) / 4;
  uint32_t words[kWords];
};

// kOnce: nobody reads these bytes again.
template <class Element, bool kOnce = false>
__device__ __forceinline__ GroupBits<Element> load_group(const void* source) {
  using Words = std::conditional_t<sizeof(Element) == 1, U32x2, U32x4>;
  constexpr int kAccesses = sizeof(GroupBits<Element>) / sizeof(Words);
  GroupBits<Element> bits;
#pragma unroll
  for (int i = 0; i < kAccesses; ++i) {
    const auto* address = in_memory<const Words>(source) + i;
    const Words words = kOnce ? load_once(address) : *address;
    memcpy(&bits.words[i * (sizeof(Words) / 4)], &words, sizeof(words));
  }
  return bits;
}

template <class Element>
__device__ __forceinline__ void store_group(void* target, const GroupBits<Element>& bits) {
  using Words = std::conditional_t<sizeof(Element) == 1, U32x2, U32x4>;
  auto* address = in_memory<Words>(target);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(bits) / sizeof(Words)); ++i) {
    Words words;
    memcpy(&words, &bits.words[i * (sizeof(Words) / 4)], sizeof(words));
    address[i] = words;
  }
}

__device__ __forceinline__ void store_words(void* target, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  *in_memory<U32x4>(target) = U32x4{a, b, c, d};
}

template <class Element>
__device__ __forceinline__ float element_at(const GroupBits<Element>& bits, int i) {
  constexpr int kPerWord = 4 / sizeof(Element);
  const uint32_t word = bits.words[i / kPerWord] >> (i % kPerWord * 8 * sizeof(Element));
  if constexpr (std::is_same_v<Element, float>) {
    return __uint_as_float(word);
  } else if constexpr (sizeof(Element) == 2) {
    return to_float(bits_as<Element>(static_cast<uint16_t>(word)));
  } else {
    return to_float(Element{static_cast<uint8_t>(word)});
  }
}

// Values times `multiply`.
template <class Element>
__device__ __forceinline__ void to_floats(const GroupBits<Element>& bits, float multiply, float (&x)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; ++i) x[i] = element_at(bits, i) * multiply;
}

// Two values as 8-bit codes, the first in the low byte.
template <class Element>
__device__ __forceinline__ uint32_t e4m3_pair(float first, float second, bool saturate) {
  if constexpr (std::is_same_v<Element, NativeE4M3>) return native_e4m3_pair<false>(first, second, saturate);
  return from_float<Element>(first, saturate).bits | uint32_t{from_float<Element>(second, saturate).bits} << 8;
}
__device__ __forceinline__ uint32_t e4m3fn_pair(float first, float second, bool saturate) {
  return e4m3_pair<E4M3FN>(first, second, saturate);
}

template <class Element>
__device__ __forceinline__ GroupBits<Element> from_floats(const float (&x)[kGroup], bool saturate) {
  GroupBits<Element> bits;
#pragma unroll
  for (int word = 0; word < GroupBits<Element>::kWords; ++word) {
    const float* four = x + word * (4 / sizeof(Element));
    if constexpr (std::is_same_v<Element, float>) {
      bits.words[word] = __float_as_uint(four[0]);
    } else if constexpr (sizeof(Element) == 2) {
      const Vector<Element, 2> pair{{from_float<Element>(four[0]), from_float<Element>(four[1])}};
      memcpy(&bits.words[word], &pair, sizeof(pair));
    } else {
      bits.words[word] = e4m3_pair<Element>(four[0], four[1], saturate) | e4m3_pair<Element>(four[2], four[3], saturate)
                                                                              << 16;
    }
  }
  return bits;
}

}  // namespace mla
