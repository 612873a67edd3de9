#define MLA_ISA avx2
#define MLA_LANES 8
#include "kernels/prefill/cpu/attention_f32.h"

const mla::cpu::PrefillKernels mla::cpu::kAvx2Prefill = mla::avx2::prefill::kKernels;
