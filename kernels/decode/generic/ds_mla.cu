#include "kernels/decode/generic/instance.cuh"

namespace mla {

Error decode_generic_ds_mla(const DecodeParams& params, const Device& device, int32_t shared_limit) {
  return launch_generic<DsMla>(params, device, shared_limit);
}

}  // namespace mla
