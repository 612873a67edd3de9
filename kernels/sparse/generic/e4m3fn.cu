#include "kernels/sparse/generic/instance.cuh"

namespace mla {

Error sparse_generic_e4m3fn(const SparseDecodeParams& params, const Device& device, int32_t shared_limit) {
  return generic_sparse::launch_sparse<E4M3FN>(params, device, shared_limit);
}

}  // namespace mla
