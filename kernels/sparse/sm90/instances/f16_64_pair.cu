#include "kernels/sparse/sm90/instance.cuh"

namespace mla::sparse_sm90 {

template Error launch_instance<__half, 64, 2>(const SparseDecodeParams&, const QueryMaps&, const Device&);

}  // namespace mla::sparse_sm90
