// Picks the instance for the cache and the tiles; describes the queries to the copy engine where it brings them.
#include "kernels/sparse/sm90/sparse.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/decode/sm90/query_maps.h"
#include "kernels/sparse/sm90/fp8/instance.h"
#include "kernels/sparse/sm90/fp8/layouts.h"
#include "kernels/sparse/sm90/instance.h"
#include "kernels/sparse/sm90/limits.h"

namespace mla {
namespace sparse_sm90 {
namespace {

Error no_instance(const SparseDecodeParams& params) {
  return "jax_mla: mla_sparse_decode's Hopper kernel has no instance for " + std::to_string(params.tile_rows) +
         " heads a tile";
}

template <class Element>
Error launch_rows(const SparseDecodeParams& params, const Device& device) {
  QueryMaps maps;
  const Error error = sm90::encode_queries(&maps, "mla_sparse_decode", params.tile_rows, params);
  if (!error.empty()) return error;
  switch (params.tile_rows) {
    case 8: return launch_instance<Element, 8>(params, maps, device);
    case 16: return launch_instance<Element, 16>(params, maps, device);
    case 24: return launch_instance<Element, 24>(params, maps, device);
    case 32: return launch_instance<Element, 32>(params, maps, device);
    case 40: return launch_instance<Element, 40>(params, maps, device);
    case 48: return launch_instance<Element, 48>(params, maps, device);
    case 64: return launch_instance<Element, 64>(params, maps, device);
    default: return no_instance(params);
  }
}

Error launch_ds_mla(const SparseDecodeParams& params, const Device& device) {
  switch (params.tile_rows) {
    case 8: return fp8::launch_instance<fp8::DsMla, 8>(params, device);
    case 16: return fp8::launch_instance<fp8::DsMla, 16>(params, device);
    case 24: return fp8::launch_instance<fp8::DsMla, 24>(params, device);
    case 32: return fp8::launch_instance<fp8::DsMla, 32>(params, device);
    case 40: return fp8::launch_instance<fp8::DsMla, 40>(params, device);
    case 64: return fp8::launch_instance<fp8::DsMla, 64>(params, device);
    default: return no_instance(params);
  }
}

Error launch_e4m3fn(const SparseDecodeParams& params, const Device& device) {
  switch (params.tile_rows) {
    case 8: return fp8::launch_instance<fp8::PerTensor, 8>(params, device);
    case 16: return fp8::launch_instance<fp8::PerTensor, 16>(params, device);
    case 24: return fp8::launch_instance<fp8::PerTensor, 24>(params, device);
    case 32: return fp8::launch_instance<fp8::PerTensor, 32>(params, device);
    case 40: return fp8::launch_instance<fp8::PerTensor, 40>(params, device);
    case 48: return fp8::launch_instance<fp8::PerTensor, 48>(params, device);
    case 64: return fp8::launch_instance<fp8::PerTensor, 64>(params, device);
    default: return no_instance(params);
  }
}

}  // namespace
}  // namespace sparse_sm90

Error sparse_sm90_decode(const SparseDecodeParams& params, const Device& device) {
  if (params.ds_mla) return sparse_sm90::launch_ds_mla(params, device);
  switch (params.cache_dtype) {
    case DType::kBF16: return sparse_sm90::launch_rows<__nv_bfloat16>(params, device);
    case DType::kF16: return sparse_sm90::launch_rows<__half>(params, device);
    default: return sparse_sm90::launch_e4m3fn(params, device);
  }
}

}  // namespace mla
