#include "kernels/prefill/generic/prefill.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace mla {

Error prefill_generic(const PrefillParams& params, const Device& device) {
  return params.dtype == DType::kBF16 ? generic_prefill::launch_instance<__nv_bfloat16>(params, device)
                                      : generic_prefill::launch_instance<__half>(params, device);
}

}  // namespace mla
