// wgmma (sm_90a): D[64 x N] += A[64 x 16] B[16 x N] by a warpgroup of four warps, A and B in shared memory, fp32 sums.
//
// D: warp w of the group holds rows 16w .. 16w+15; lane 4 * g + t has in d[4j], d[4j+1] row g, columns 8j + 2t and
// 8j + 2t + 1, in d[4j+2], d[4j+3] the same of row g + 8.
//
// Operands lie as the copy engine's 128-byte swizzle leaves them: lines of 128 bytes (64 elements), eight lines an atom
// of 1024 bytes, aligned to that, with chunk c of 16 bytes of line r at c ^ (r % 8).
//   K-major (lines run along the 16 of the product): A and B without transposition. 16 columns on: + 32 bytes.
//   MN-major (lines run along the 64 rows of A): A transposed. 16 lines on: + 2048 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace mla::ptx {

// A matrix whose atoms follow one another without gaps, by the low word of its descriptor, which counts in units of 16
// bytes: add bytes / 16 to move. It has to come to the instruction in a uniform register. A word that the compiler
// knows to be the same in all lanes, and sums of 32 bits, keep it there; else more instructions go into each operand
// than into its product.
__device__ __forceinline__ uint32_t matrix_operand(uint32_t shared) {
  constexpr uint32_t kAtom = 1024 >> 4;  // from one group of eight lines to the next, in either direction
  return __shfl_sync(0xFFFFFFFF, kAtom << 16 | (shared & 0x3FFFF) >> 4, 0);
}

// kStride: from one group of eight lines to the next along the lines' number, where atoms do not follow one another.
template <int kStride = 1024>
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t operand) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | uint64_t{kStride >> 4} << 32 | operand;
}

// Before the first wgmma, and before one that follows ordinary accesses to its registers.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

// No instruction: keeps the compiler from moving accesses to sums across the waits for the products that make them.
template <int kSums>
__device__ __forceinline__ void hold(float (&d)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Waits until at most kPending of the committed groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// d = a * b + (accumulate ? d : 0). kTransposed: A is MN-major.
template <class Element, bool kTransposed, int kSums>
struct Wgmma;

#define MLA_SUMS_8 "%0, %1, %2, %3"
#define MLA_SUMS_16 MLA_SUMS_8 ", %4, %5, %6, %7"
#define MLA_SUMS_24 MLA_SUMS_16 ", %8, %9, %10, %11"
#define MLA_SUMS_32 MLA_SUMS_24 ", %12, %13, %14, %15"
#define MLA_SUMS_40 MLA_SUMS_32 ", %16, %17, %18, %19"
#define MLA_SUMS_48 MLA_SUMS_40 ", %20, %21, %22, %23"
#define MLA_SUMS_56 MLA_SUMS_48 ", %24, %25, %26, %27"
#define MLA_SUMS_64 MLA_SUMS_56 ", %28, %29, %30, %31"

#define MLA_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MLA_D_8 MLA_FOUR(0)
#define MLA_D_16 MLA_D_8, MLA_FOUR(4)
#define MLA_D_24 MLA_D_16, MLA_FOUR(8)
#define MLA_D_32 MLA_D_24, MLA_FOUR(12)
#define MLA_D_40 MLA_D_32, MLA_FOUR(16)
#define MLA_D_48 MLA_D_40, MLA_FOUR(20)
#define MLA_D_56 MLA_D_48, MLA_FOUR(24)
#define MLA_D_64 MLA_D_56, MLA_FOUR(28)

// A, B, ACCUMULATE, TRANSPOSED: the numbers of the operands behind the sums.
#define MLA_WGMMA_ASM(N, TYPES, A, B, ACCUMULATE, TRANSPOSED)                                            \
  asm volatile(                                                                                          \
      "{\n"                                                                                              \
      ".reg .pred p;\n"                                                                                  \
      "setp.ne.b32 p, " ACCUMULATE                                                                       \
      ", 0;\n"                                                                                           \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" MLA_SUMS_##N "}, " A ", " B           \
                                                                                ", p, 1, 1, " TRANSPOSED \
                                                                                ", 0;\n"                 \
                                                                                "}\n"                    \
      : MLA_D_##N                                                                                        \
      : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)), "n"(static_cast<int32_t>(kTransposed)))

#define MLA_WGMMA(N, A, B, ACCUMULATE, TRANSPOSED)                                                           \
  template <class Element, bool kTransposed>                                                                 \
  struct Wgmma<Element, kTransposed, N / 2> {                                                                \
    static __device__ __forceinline__ void run(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) { \
      if constexpr (std::is_same_v<Element, __half>) {                                                       \
        MLA_WGMMA_ASM(N, "f16.f16", A, B, ACCUMULATE, TRANSPOSED);                                           \
      } else {                                                                                               \
        static_assert(std::is_same_v<Element, __nv_bfloat16>);                                               \
        MLA_WGMMA_ASM(N, "bf16.bf16", A, B, ACCUMULATE, TRANSPOSED);                                         \
      }                                                                                                      \
    }                                                                                                        \
  };

MLA_WGMMA(8, "%4", "%5", "%6", "%7")
MLA_WGMMA(16, "%8", "%9", "%10", "%11")
MLA_WGMMA(24, "%12", "%13", "%14", "%15")
MLA_WGMMA(32, "%16", "%17", "%18", "%19")
MLA_WGMMA(40, "%20", "%21", "%22", "%23")
MLA_WGMMA(48, "%24", "%25", "%26", "%27")
MLA_WGMMA(56, "%28", "%29", "%30", "%31")
MLA_WGMMA(64, "%32", "%33", "%34", "%35")

#undef MLA_WGMMA
#undef MLA_WGMMA_ASM
#undef MLA_D_64
#undef MLA_D_56
#undef MLA_D_48
#undef MLA_D_40
#undef MLA_D_32
#undef MLA_D_24
#undef MLA_D_16
#undef MLA_D_8
#undef MLA_FOUR
#undef MLA_SUMS_64
#undef MLA_SUMS_56
#undef MLA_SUMS_48
#undef MLA_SUMS_40
#undef MLA_SUMS_32
#undef MLA_SUMS_24
#undef MLA_SUMS_16
#undef MLA_SUMS_8

// kStride: matrix_descriptor's, of B.
template <class Element, bool kTransposed, int kStride = 1024, int kSums>
__device__ __forceinline__ void wgmma(float (&d)[kSums], uint32_t a, uint32_t b, bool accumulate) {
  Wgmma<Element, kTransposed, kSums>::run(d, matrix_descriptor(a), matrix_descriptor<kStride>(b), accumulate);
}

}  // namespace mla::ptx
