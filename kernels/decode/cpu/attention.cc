#include "kernels/decode/cpu/attention.h"

#include "kernels/cpu/rows.h"

namespace mla::cpu {
namespace {

[[maybe_unused]] bool fits_bf16(DType type) { return size_of(type) == 1 || type == DType::kBF16; }

}  // namespace

// fp16 and fp32 keep more than bf16 holds: the sets whose bf16 kernels come first run those in fp32.
const AttentionKernel& attention_kernel([[maybe_unused]] Isa isa, [[maybe_unused]] DType q,
                                        [[maybe_unused]] DType cache) {
#if defined(__x86_64__)
  const bool bf16 = fits_bf16(q) && fits_bf16(cache);
  switch (isa) {
    case Isa::kAmx: return bf16 ? kAmxAttention : kAvx512Attention;
    case Isa::kAvx512Bf16: return bf16 ? kAvx512Bf16Attention : kAvx512Attention;
    case Isa::kAvx512: return kAvx512Attention;
    case Isa::kAvx2: return kAvx2Attention;
    case Isa::kPortable: break;
  }
#endif
  return kPortableAttention;
}

}  // namespace mla::cpu
