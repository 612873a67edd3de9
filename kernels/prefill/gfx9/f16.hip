#include "kernels/prefill/gfx9/kernel.h"

MLA_KERNEL __launch_bounds__(mla::gfx9_prefill::kThreads) MLA_WAVES_A_SIMD(2) mla_prefill_f16(mla::PrefillParams p) {
  __shared__ __attribute__((aligned(128))) unsigned char memory[mla::gfx9_prefill::kLdsBytes];
  mla::gfx9_prefill::prefill<mla::F16>(p, mla::lds_address(memory));
}
