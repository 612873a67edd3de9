#define MLA_ISA avx512
#define MLA_LANES 16
#include "kernels/prefill/cpu/attention_f32.h"

const mla::cpu::PrefillKernels mla::cpu::kAvx512Prefill = mla::avx512::prefill::kKernels;
