#include "kernels/cuda/launch.h"
#include "kernels/decode/generic/instance.h"

namespace mla {

Error decode_generic(const DecodeParams& params, const Device& device, int32_t shared_limit) {
  if (params.ds_mla) return decode_generic_ds_mla(params, device, shared_limit);
  switch (params.cache_dtype) {
    case DType::kBF16: return decode_generic_bf16(params, device, shared_limit);
    case DType::kF16: return decode_generic_f16(params, device, shared_limit);
    case DType::kE4M3FN: return decode_generic_e4m3fn(params, device, shared_limit);
    default:
      return std::string("jax_mla: mla_decode's generic kernel reads no cache in ") + name_of(params.cache_dtype);
  }
}

}  // namespace mla
