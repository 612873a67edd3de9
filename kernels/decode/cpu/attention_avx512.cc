#define MLA_ISA avx512
#define MLA_LANES 16
#include "kernels/decode/cpu/attention_f32.h"

const mla::cpu::AttentionKernel mla::cpu::kAvx512Attention = {mla::avx512::f32_scratch_bytes,
                                                              mla::avx512::attend<mla::avx512::Float32>};
