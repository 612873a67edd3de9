#include "kernels/decode/generic/instance.cuh"

namespace mla {

Error decode_generic_f16(const DecodeParams& params, const Device& device, int32_t shared_limit) {
  return launch_generic<__half>(params, device, shared_limit);
}

}  // namespace mla
