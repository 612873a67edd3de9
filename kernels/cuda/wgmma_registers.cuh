// wgmma (sm_90a) whose A comes from registers: D[64 x 128] += A[64 x 16] B[16 x 128], B in shared memory, fp32 sums.
// See wgmma.cuh for D and for the layout of lines and atoms.
//
// A: warp w of the group holds rows 16w .. 16w+15; lane 4 * g + t has row g, columns 2t and 2t + 1 in a[0], columns
// 2t + 8 and 2t + 9 in a[2], and of row g + 8 the same in a[1] and a[3]. So neighbouring sums of one product, packed in
// their order, are the A of another one.
// B, not transposed, is K-major: 128 lines, 16 columns on: + 32 bytes. Transposed it is MN-major: its lines, one for
// each of the 16, run along its columns, 64 in a line; the two halves lie as wide_operand says. 16 lines on: + 2048.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/wgmma.cuh"

namespace mla::ptx {

// Four matrices of 8 x 8 from shared memory: lanes 8i .. 8i+7 give the addresses of the rows of matrix i; lane
// 4 * g + t gets row g, columns 2t, 2t+1 of each.
__device__ __forceinline__ void ldmatrix_x4(uint32_t shared, uint32_t (&matrices)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared)
               : "memory");
}

// B of two halves, which lie kPieces bytes apart: the low word of its descriptor.
template <int kPieces>
__device__ __forceinline__ uint32_t wide_operand(uint32_t shared) {
  return __shfl_sync(0xFFFFFFFF, uint32_t{kPieces >> 4} << 16 | (shared & 0x3FFFF) >> 4, 0);
}

#define MLA_SUMS                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MLA_EIGHT(i)                                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define MLA_REGISTER_WGMMA(TYPES)                                                                                     \
  asm volatile(                                                                                                       \
      "{\n"                                                                                                           \
      ".reg .pred p;\n"                                                                                               \
      "setp.ne.b32 p, %69, 0;\n"                                                                                      \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPES " {" MLA_SUMS                                              \
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n"                                                                 \
      "}\n"                                                                                                           \
      : MLA_EIGHT(0), MLA_EIGHT(8), MLA_EIGHT(16), MLA_EIGHT(24), MLA_EIGHT(32), MLA_EIGHT(40), MLA_EIGHT(48),        \
        MLA_EIGHT(56)                                                                                                 \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(matrix_descriptor(b)), "r"(static_cast<int32_t>(accumulate)), \
        "n"(static_cast<int32_t>(kTransposed)))

// d = a * b + (accumulate ? d : 0). b: the low word of B's descriptor, from matrix_operand, or from wide_operand where
// kTransposed. `a` must stay as it is until the product has been waited for.
template <class Element, bool kTransposed>
__device__ __forceinline__ void wgmma_registers(float (&d)[64], const uint32_t (&a)[4], uint32_t b, bool accumulate) {
  if constexpr (std::is_same_v<Element, __half>) {
    MLA_REGISTER_WGMMA("f16.f16");
  } else {
    static_assert(std::is_same_v<Element, __nv_bfloat16>);
    MLA_REGISTER_WGMMA("bf16.bf16");
  }
}

#undef MLA_REGISTER_WGMMA
#undef MLA_EIGHT
#undef MLA_SUMS

}  // namespace mla::ptx
