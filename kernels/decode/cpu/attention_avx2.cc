#define MLA_ISA avx2
#define MLA_LANES 8
#include "kernels/decode/cpu/attention_f32.h"

const mla::cpu::AttentionKernel mla::cpu::kAvx2Attention = {mla::avx2::f32_scratch_bytes,
                                                            mla::avx2::attend<mla::avx2::Float32>};
