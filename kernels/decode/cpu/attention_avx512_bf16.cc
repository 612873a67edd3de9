#define MLA_ISA avx512_bf16
#define MLA_LANES 16
#define MLA_WORK_TOKENS 128
#include "kernels/decode/cpu/attention_bf16.h"

namespace mla::avx512_bf16 {

static int64_t scratch_bytes(int32_t rows) { return BFloat16Pairs::W{}.carve(nullptr, rows); }

}  // namespace mla::avx512_bf16

const mla::cpu::AttentionKernel mla::cpu::kAvx512Bf16Attention = {
    mla::avx512_bf16::scratch_bytes, mla::avx512_bf16::attend<mla::avx512_bf16::BFloat16Pairs>};
