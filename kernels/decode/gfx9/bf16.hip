#include "kernels/decode/gfx9/kernel.h"

namespace mla::gfx9 {

template <int kRows>
__device__ __forceinline__ void decode_rows() {
  decode_part<BF16, Shape<kRows>, PlainBlocks<PagedTokens<PlainFormat::kTokenBytes>>>();
}

}  // namespace mla::gfx9

#define MLA_DECODE(rows)                                                                            \
  MLA_KERNEL __launch_bounds__(256) MLA_WAVES_A_SIMD(1) mla_decode_bf16_##rows(mla::DecodeParams) { \
    mla::gfx9::decode_rows<rows>();                                                                 \
  }
MLA_DECODE(32)
MLA_DECODE(64)
