// Describes the queries to the copy engine and picks the instance for the tiles.
#include "kernels/sparse/sm90/sparse.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/decode/sm90/query_maps.h"
#include "kernels/sparse/sm90/instance.h"

namespace mla {
namespace sparse_sm90 {
namespace {

template <class Element>
Error launch_rows(const SparseDecodeParams& params, const QueryMaps& maps, const Device& device) {
  switch (params.tile_rows) {
    case 8: return launch_instance<Element, 8>(params, maps, device);
    case 16: return launch_instance<Element, 16>(params, maps, device);
    case 24: return launch_instance<Element, 24>(params, maps, device);
    case 32: return launch_instance<Element, 32>(params, maps, device);
    case 40: return launch_instance<Element, 40>(params, maps, device);
    case 48: return launch_instance<Element, 48>(params, maps, device);
    case 64: return launch_instance<Element, 64>(params, maps, device);
    default:
      return "jax_mla: mla_sparse_decode's Hopper kernel has no instance for " + std::to_string(params.tile_rows) +
             " heads a tile";
  }
}

}  // namespace
}  // namespace sparse_sm90

Error sparse_sm90_decode(const SparseDecodeParams& params, const Device& device) {
  sparse_sm90::QueryMaps maps;
  const Error error = sm90::encode_queries(&maps, "mla_sparse_decode", params.tile_rows, params);
  if (!error.empty()) return error;
  return params.q_dtype == DType::kBF16 ? sparse_sm90::launch_rows<__nv_bfloat16>(params, maps, device)
                                        : sparse_sm90::launch_rows<__half>(params, maps, device);
}

}  // namespace mla
