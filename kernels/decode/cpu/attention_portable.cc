#define MLA_ISA portable
#define MLA_LANES 4
#include "kernels/decode/cpu/attention_f32.h"

const mla::cpu::AttentionKernel mla::cpu::kPortableAttention = {mla::portable::f32_scratch_bytes,
                                                                mla::portable::attend<mla::portable::Float32>};
