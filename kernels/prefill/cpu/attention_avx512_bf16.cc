#define MLA_ISA avx512_bf16
#define MLA_LANES 16
#define MLA_BLOCK_KEYS 128
#include "kernels/prefill/cpu/attention_bf16.h"

const mla::cpu::PrefillKernel mla::cpu::kAvx512Bf16Prefill = {
    mla::avx512_bf16::prefill::scratch_bytes<mla::avx512_bf16::prefill::BFloat16Pairs>,
    mla::avx512_bf16::prefill::attend<mla::avx512_bf16::prefill::BFloat16Pairs>};
