#include "kernels/decode/generic/instance.cuh"

namespace mla {

Error decode_generic_e4m3fn(const DecodeParams& params, const Device& device, int32_t shared_limit) {
  return launch_generic<E4M3FN>(params, device, shared_limit);
}

}  // namespace mla
