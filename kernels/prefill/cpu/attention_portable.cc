#define MLA_ISA portable
#define MLA_LANES 4
#include "kernels/prefill/cpu/attention_f32.h"

const mla::cpu::PrefillKernels mla::cpu::kPortablePrefill = mla::portable::prefill::kKernels;
