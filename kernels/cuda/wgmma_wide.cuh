// wgmma (sm_90a) with 256 columns: D[64 x 256] += A[64 x 16] B[16 x 256], A in registers, B in shared memory, fp32
// sums. See wgmma.cuh for D and for the layout of lines and atoms, wgmma_registers.cuh for A.
//
// B is MN-major: its lines, one for each of the 16, run along its columns, 64 in a line; the four pieces of a line lie
// kPieces bytes apart, its groups of eight lines kLines.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/wgmma.cuh"

namespace mla::ptx {

// The low word of B's descriptor; the high word is that of matrix_descriptor.
template <int kPieces>
__device__ __forceinline__ uint32_t wide_operand(uint32_t shared) {
  return __shfl_sync(0xFFFFFFFF, uint32_t{kPieces >> 4} << 16 | (shared & 0x3FFFF) >> 4, 0);
}

#define MLA_WIDE_SUMS                                                                            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MLA_SIXTEEN(i)                                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7]), "+f"(d[i + 8]), "+f"(d[i + 9]), "+f"(d[i + 10]), "+f"(d[i + 11]), "+f"(d[i + 12]),      \
      "+f"(d[i + 13]), "+f"(d[i + 14]), "+f"(d[i + 15])
#define MLA_WIDE_WGMMA(TYPES)                                                                                         \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPES " {" MLA_WIDE_SUMS                                \
               "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;\n"                                                     \
               : MLA_SIXTEEN(0), MLA_SIXTEEN(16), MLA_SIXTEEN(32), MLA_SIXTEEN(48), MLA_SIXTEEN(64), MLA_SIXTEEN(80), \
                 MLA_SIXTEEN(96), MLA_SIXTEEN(112)                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(matrix_descriptor<kLines>(b)))

// `a` must stay as it is until the product has been waited for.
template <class Element, int kLines>
__device__ __forceinline__ void wgmma_wide(float (&d)[128], const uint32_t (&a)[4], uint32_t b) {
  if constexpr (std::is_same_v<Element, __half>) {
    MLA_WIDE_WGMMA("f16.f16");
  } else {
    static_assert(std::is_same_v<Element, __nv_bfloat16>);
    MLA_WIDE_WGMMA("bf16.bf16");
  }
}

#undef MLA_WIDE_WGMMA
#undef MLA_SIXTEEN
#undef MLA_WIDE_SUMS

}  // namespace mla::ptx
