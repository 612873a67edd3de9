// Cached tokens in shared memory as B fragments of the tensor cores: 16-bit elements as they are, e4m3fn as halves.
//
// ldmatrix moves 16-bit units, so two fp8 columns travel as one. Which column takes which place does not matter for
// the sum over columns in Q K^T, as long as the queries have the same order; and in P V it only says where a result
// belongs. So each group of 16 columns is taken apart into its even and its odd ones, which costs least:
//   Q K^T: a lane's four neighbouring columns 4t .. 4t+3 are places 2t, 2t+1 (even), 2t+8, 2t+9 (odd) of the product.
//   P V:   column n of the first product is column 2n of the group, column n of the second is 2n + 1.
#pragma once

#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/ptx.cuh"

namespace mla {

// Of four e4m3fn, bytes 1 and 3 as halves, by shifts: a half's exponent has a bit more and a bias of 15 where e4m3fn's
// is 7, so the shifted bits are 2^-8 of the value, denormal or not. A NaN comes out as 480, which no finite code is.
__device__ __forceinline__ uint32_t odd_by_shifts(uint32_t bytes) {
  const uint32_t shifted = (bytes >> 1 & 0x3F803F80) | (bytes & 0x80008000);
  const __half2 halves = __hmul2(reinterpret_cast<const __half2&>(shifted), __float2half2_rn(256.0f));
  return reinterpret_cast<const uint32_t&>(halves);
}

// Bytes 0 and 2 in `even`, 1 and 3 in `odd`. (Shifts for a half of them, beside the instruction, took longer.)
__device__ __forceinline__ void split_e4m3fn(uint32_t bytes, uint32_t& even, uint32_t& odd) {
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}\n"
      : "=r"(even), "=r"(odd)
      : "r"(__byte_perm(bytes, 0, 0x3120)));
#else
  even = odd_by_shifts(bytes << 8);
  odd = odd_by_shifts(bytes);
#endif
}

// NaN among the keys, where shifts lose it: the scores of such a token become NaN, and so the weights by which its
// values are multiplied. Of 16 tokens, `largest[n]` is a lane's share of token 8 * n + lane / 4.
struct NanSearch {
#if __CUDA_ARCH__ >= 890
  __device__ __forceinline__ void add(int, uint32_t, uint32_t) {}
  template <class Scores>
  __device__ __forceinline__ void mark(int, Scores&) const {}
#else
  __half2 largest[2] = {};

  __device__ __forceinline__ void add(int n, uint32_t even, uint32_t odd) {
    const __half2 larger =
        __hmax2(__habs2(reinterpret_cast<const __half2&>(even)), __habs2(reinterpret_cast<const __half2&>(odd)));
    largest[n] = __hmax2(largest[n], larger);
  }

  // `scores`: of tokens 8 * n to 8 * n + 7, as D fragments.
  template <int kFragments>
  __device__ __forceinline__ void mark(int n, float (&scores)[kFragments][4]) const {
    const bool found = !__hble2(largest[n], __float2half2_rn(448.0f));
    const uint32_t lanes = __ballot_sync(0xFFFFFFFF, found);
    if (lanes == 0) return;
    const int token = threadIdx.x % 4 * 2;
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
      if ((lanes >> 4 * token & 0xF) != 0) scores[m][0] = scores[m][2] = NAN;
      if ((lanes >> 4 * token & 0xF0) != 0) scores[m][1] = scores[m][3] = NAN;
    }
  }
#endif
};

// How a warp reads 16 tokens and 16 columns, a group of them: `address` is where this lane reads, from a lane's offset
// for the group of its warp. Groups 64 (of keys) or 128 columns (of values) further lie at the same place in the
// swizzle, so that all groups of a warp are one register and constants.
template <class Cached, class Shape>
struct Fragments {
  using Element = Cached;  // that the tensor cores multiply

  // [token][column] is B transposed, as ldmatrix wants it. Matrices: tokens 0-7 columns 0-7, tokens 0-7 columns 8-15,
  // tokens 8-15 columns 0-7, tokens 8-15 columns 8-15: b0 and b1 of two neighbouring products.
  static __device__ __forceinline__ uint32_t key_offset(int lane, int group) {
    const int token = lane / 16 * 8 + lane % 8, chunk = group * 2 + lane / 8 % 2;
    return token * Shape::kTokenBytes + ((chunk ^ Shape::swizzle(token)) << 4);
  }
  struct Search {  // a NaN stays one
    template <class Scores>
    __device__ __forceinline__ void mark(int, Scores&) const {}
  };
  static __device__ __forceinline__ void load_keys(uint32_t (&keys)[4], uint32_t address, Search&) {
    ptx::ldmatrix_x4(keys, address);
  }

  // [token][column] is B itself, so transposed by ldmatrix. Matrices: tokens 0-7 columns 0-7, tokens 8-15 columns 0-7,
  // tokens 0-7 columns 8-15, tokens 8-15 columns 8-15.
  static __device__ __forceinline__ uint32_t value_offset(int lane, int group) {
    const int token = lane % 16, chunk = group * 2 + lane / 16;
    return token * Shape::kTokenBytes + ((chunk ^ Shape::swizzle(token)) << 4);
  }
  static __device__ __forceinline__ void load_values(uint32_t (&values)[4], uint32_t address) {
    ptx::ldmatrix_x4_trans(values, address);
  }

  // Two elements; those that are infinite or NaN become 0.
  static __device__ __forceinline__ uint32_t finite(uint32_t bits) {
    constexpr uint32_t kExponent = std::is_same_v<Cached, __half> ? 0x7C00 : 0x7F80;
    if ((bits & kExponent) == kExponent) bits &= 0xFFFF0000;
    if ((bits >> 16 & kExponent) == kExponent) bits &= 0x0000FFFF;
    return bits;
  }
};

template <class Shape>
struct Fragments<E4M3FN, Shape> {
  using Element = __half;
  using Search = NanSearch;

  // Matrices of 8 tokens by 16 columns: tokens 0-7, tokens 8-15. (Lanes 16 to 31 give no address.)
  static __device__ __forceinline__ uint32_t key_offset(int lane, int group) {
    const int token = lane % 16;
    return token * Shape::kTokenBytes + ((group ^ Shape::swizzle(token)) << 4);
  }
  static __device__ __forceinline__ void load_keys(uint32_t (&keys)[4], uint32_t address, Search& nan) {
    uint32_t bytes[2];
    ptx::ldmatrix_x2(bytes, address);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      split_e4m3fn(bytes[n], keys[2 * n], keys[2 * n + 1]);
      nan.add(n, keys[2 * n], keys[2 * n + 1]);
    }
  }

  static __device__ __forceinline__ uint32_t value_offset(int lane, int group) { return key_offset(lane, group); }
  static __device__ __forceinline__ void load_values(uint32_t (&values)[4], uint32_t address) {
    uint32_t bytes[2];
    ptx::ldmatrix_x2_trans(bytes, address);
    split_e4m3fn(bytes[0], values[0], values[2]);
    split_e4m3fn(bytes[1], values[1], values[3]);
  }

  // Four elements; those that are NaN become 0.
  static __device__ __forceinline__ uint32_t finite(uint32_t bits) {
    const uint32_t nan = ((bits & 0x7F7F7F7F) + 0x01010101) >> 7 & 0x01010101;
    return bits & ~(nan * 0xFF);
  }
};

}  // namespace mla
