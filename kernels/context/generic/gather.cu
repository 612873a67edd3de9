// gather_context on CUDA.
#include "kernels/context/generic/gather_rows.cuh"
#include "kernels/cuda/launch.h"

namespace mla {
namespace {

template <class Cached, class Output>
__global__ void __launch_bounds__(kGatherThreads) gather_kernel(const __grid_constant__ GatherContextParams p) {
  gather_row<Cached, Output>(p);
}

template <class Cached, class Output>
Error launch_gather(const GatherContextParams& params, const Device& device) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>((params.rows + kGatherRows - 1) / kGatherRows));
  shape.block = dim3(kGatherThreads);
  return launch("gather_context", gather_kernel<Cached, Output>, shape, device, params);
}

template <class Cached>
Error launch_cached(const GatherContextParams& params, const Device& device) {
  switch (params.output_dtype) {
    case DType::kF32: return launch_gather<Cached, float>(params, device);
    case DType::kBF16: return launch_gather<Cached, __nv_bfloat16>(params, device);
    case DType::kF16: return launch_gather<Cached, __half>(params, device);
    default: return std::string("jax_mla: gather_context on CUDA cannot write ") + name_of(params.output_dtype);
  }
}

}  // namespace

Error gather_context(const GatherContextParams& params, const Device& device) {
  if (params.rows == 0) return {};
  if (params.ds_mla) return launch_cached<DsMla>(params, device);
  switch (params.cache_dtype) {
    case DType::kF32: return launch_cached<float>(params, device);
    case DType::kBF16: return launch_cached<__nv_bfloat16>(params, device);
    case DType::kF16: return launch_cached<__half>(params, device);
    case DType::kE4M3FN: return launch_cached<E4M3FN>(params, device);
    case DType::kE4M3FNUZ: return launch_cached<E4M3FNUZ>(params, device);
  }
  return "jax_mla: gather_context on CUDA cannot read this cache";
}

}  // namespace mla
