// wgmma (sm_90a) of e4m3: D[64 x 128] += A[64 x 32] B[32 x 128], A in registers, B in shared memory, K-major (there is
// no other for 8 bits), sums in fp32 of which the tensor cores keep about 14 bits while they add. See wgmma.cuh for D.
//
// A: warp w of the group holds rows 16w .. 16w+15; lane 4 * g + t has row g, columns 4t .. 4t + 3 in a[0], columns
// 4t + 16 .. 4t + 19 in a[2], and of row g + 8 the same in a[1] and a[3]; ldmatrix_x4 brings them.
#pragma once

#include <cstdint>

#include "kernels/cuda/wgmma.cuh"

namespace mla::ptx {

// B's 128 lines have 64 bytes in the copy engine's 64-byte swizzle: chunk c of 16 bytes of line r lies at c ^ (r / 2 %
// 4), eight lines an atom of 512 bytes, aligned to that. 32 columns on: + 32 bytes.
struct ShortLines {
  static constexpr uint64_t kSwizzle = 2, kEightLines = 512;
};

// B in tiles of 16 columns of its 128 lines: a tile has 16 bytes of each line, one line behind the other. The low word
// of its descriptor is wide_operand's, with the distance of the tiles. 32 columns on: two tiles.
struct Tiles {
  static constexpr uint64_t kSwizzle = 0, kEightLines = 128;
};

#define MLA_SUMS                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MLA_EIGHT(i)                                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

// d = a * b + (accumulate ? d : 0). b: the low word of B's descriptor, from matrix_operand for ShortLines. `a` must
// stay as it is until the product has been waited for.
template <class Layout>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], const uint32_t (&a)[4], uint32_t b, bool accumulate) {
  constexpr uint64_t kHigh = Layout::kSwizzle << 62 | Layout::kEightLines >> 4 << 32;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" MLA_SUMS
      "}, {%64, %65, %66, %67}, %68, p, 1, 1;\n"
      "}\n"
      : MLA_EIGHT(0), MLA_EIGHT(8), MLA_EIGHT(16), MLA_EIGHT(24), MLA_EIGHT(32), MLA_EIGHT(40), MLA_EIGHT(48),
        MLA_EIGHT(56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(kHigh | b), "r"(static_cast<int32_t>(accumulate)));
}

#undef MLA_EIGHT
#undef MLA_SUMS

}  // namespace mla::ptx
