#include "kernels/sparse/generic/instance.cuh"

namespace mla {

Error sparse_generic_ds_mla(const SparseDecodeParams& params, const Device& device, int32_t shared_limit) {
  return generic_sparse::launch_sparse<DsMla>(params, device, shared_limit);
}

}  // namespace mla
