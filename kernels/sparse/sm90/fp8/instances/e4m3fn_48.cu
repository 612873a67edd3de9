#include "kernels/sparse/sm90/fp8/instance.cuh"

namespace mla::sparse_sm90::fp8 {

template Error launch_instance<PerTensor, 48>(const SparseDecodeParams&, const Device&);

}  // namespace mla::sparse_sm90::fp8
