// The instructions that the fp8 kernel needs beside kernels/cuda's: e4m3 to fp16, and wgmma with its left operand in
// registers.
#pragma once

#include <cstdint>

#include "kernels/cuda/wgmma.cuh"

namespace mla::ptx {

// Two e4m3 values, the low or the high half of `bytes`, as two fp16 values. Exact, NaN stays NaN.
__device__ __forceinline__ uint32_t f16_from_e4m3_low(uint32_t bytes) {
  uint32_t pair;
  asm volatile(
      "{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "}\n"
      : "=r"(pair)
      : "r"(bytes));
  return pair;
}

__device__ __forceinline__ uint32_t f16_from_e4m3_high(uint32_t bytes) {
  uint32_t pair;
  asm volatile(
      "{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, high;\n"
      "}\n"
      : "=r"(pair)
      : "r"(bytes));
  return pair;
}

// Of two fp16 values by two others.
__device__ __forceinline__ uint32_t multiply_halves(uint32_t first, uint32_t second) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;\n" : "=r"(product) : "r"(first), "r"(second));
  return product;
}

// Bytes 0, 2, 1, 3: of two pairs side by side, the first and the second elements.
__device__ __forceinline__ uint32_t unzip_bytes(uint32_t bytes) { return __byte_perm(bytes, 0, 0x3120); }

// d = a * b + (accumulate ? d : 0): wgmma.m64nNk16 of fp16 or bf16 with fp32 sums, N = 2 * kSums. Lane 4 * g + t of
// warp w brings of A the rows 16w + g (a[0], a[2]) and 16w + g + 8 (a[1], a[3]), columns 2t, 2t + 1 (a[0], a[1]) and 2t
// + 8, 2t + 9 (a[2], a[3]); it must not touch them until the product is waited for. B as kernels/cuda/wgmma.cuh says.
template <class Element, int kSums>
struct RegisterWgmma;

#define MLA_SUMS_4 "%0, %1, %2, %3"
#define MLA_SUMS_8 MLA_SUMS_4 ", %4, %5, %6, %7"
#define MLA_SUMS_12 MLA_SUMS_8 ", %8, %9, %10, %11"
#define MLA_SUMS_16 MLA_SUMS_12 ", %12, %13, %14, %15"
#define MLA_SUMS_20 MLA_SUMS_16 ", %16, %17, %18, %19"
#define MLA_SUMS_24 MLA_SUMS_20 ", %20, %21, %22, %23"
#define MLA_SUMS_28 MLA_SUMS_24 ", %24, %25, %26, %27"
#define MLA_SUMS_32 MLA_SUMS_28 ", %28, %29, %30, %31"

#define MLA_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MLA_D_4 MLA_FOUR(0)
#define MLA_D_8 MLA_D_4, MLA_FOUR(4)
#define MLA_D_12 MLA_D_8, MLA_FOUR(8)
#define MLA_D_16 MLA_D_12, MLA_FOUR(12)
#define MLA_D_20 MLA_D_16, MLA_FOUR(16)
#define MLA_D_24 MLA_D_20, MLA_FOUR(20)
#define MLA_D_28 MLA_D_24, MLA_FOUR(24)
#define MLA_D_32 MLA_D_28, MLA_FOUR(28)

// A, B, ACCUMULATE: the numbers of the operands behind the sums.
#define MLA_REGISTER_WGMMA(N, SUMS, A, B, ACCUMULATE)                 \
  MLA_REGISTER_WGMMA_OF(__half, "f16.f16", N, SUMS, A, B, ACCUMULATE) \
  MLA_REGISTER_WGMMA_OF(__nv_bfloat16, "bf16.bf16", N, SUMS, A, B, ACCUMULATE)

#define MLA_REGISTER_WGMMA_OF(ELEMENT, TYPES, N, SUMS, A, B, ACCUMULATE)                                 \
  template <>                                                                                            \
  struct RegisterWgmma<ELEMENT, SUMS> {                                                                  \
    static __device__ __forceinline__ void run(float (&d)[SUMS], const uint32_t (&a)[4], uint64_t b,     \
                                               bool accumulate) {                                        \
      asm volatile(                                                                                      \
          "{\n"                                                                                          \
          ".reg .pred p;\n"                                                                              \
          "setp.ne.b32 p, " ACCUMULATE                                                                   \
          ", 0;\n"                                                                                       \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" MLA_SUMS_##SUMS "}, {" A "}, " B  \
                                                                                       ", p, 1, 1, 0;\n" \
                                                                                       "}\n"             \
          : MLA_D_##SUMS                                                                                 \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int32_t>(accumulate)));  \
    }                                                                                                    \
  };

MLA_REGISTER_WGMMA(8, 4, "%4, %5, %6, %7", "%8", "%9")
MLA_REGISTER_WGMMA(16, 8, "%8, %9, %10, %11", "%12", "%13")
MLA_REGISTER_WGMMA(24, 12, "%12, %13, %14, %15", "%16", "%17")
MLA_REGISTER_WGMMA(32, 16, "%16, %17, %18, %19", "%20", "%21")
MLA_REGISTER_WGMMA(40, 20, "%20, %21, %22, %23", "%24", "%25")
MLA_REGISTER_WGMMA(48, 24, "%24, %25, %26, %27", "%28", "%29")
MLA_REGISTER_WGMMA(56, 28, "%28, %29, %30, %31", "%32", "%33")
MLA_REGISTER_WGMMA(64, 32, "%32, %33, %34, %35", "%36", "%37")

#undef MLA_REGISTER_WGMMA
#undef MLA_REGISTER_WGMMA_OF
#undef MLA_D_32
#undef MLA_D_28
#undef MLA_D_24
#undef MLA_D_20
#undef MLA_D_16
#undef MLA_D_12
#undef MLA_D_8
#undef MLA_D_4
#undef MLA_FOUR
#undef MLA_SUMS_32
#undef MLA_SUMS_28
#undef MLA_SUMS_24
#undef MLA_SUMS_20
#undef MLA_SUMS_16
#undef MLA_SUMS_12
#undef MLA_SUMS_8
#undef MLA_SUMS_4

template <class Element = __half, int kSums>
__device__ __forceinline__ void register_wgmma(float (&d)[kSums], const uint32_t (&a)[4], uint32_t b, bool accumulate) {
  RegisterWgmma<Element, kSums>::run(d, a, matrix_descriptor(b), accumulate);
}

}  // namespace mla::ptx
