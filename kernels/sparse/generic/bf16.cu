#include "kernels/sparse/generic/instance.cuh"

namespace mla {

Error sparse_generic_bf16(const SparseDecodeParams& params, const Device& device, int32_t shared_limit) {
  return generic_sparse::launch_sparse<__nv_bfloat16>(params, device, shared_limit);
}

}  // namespace mla
