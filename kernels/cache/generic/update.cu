// update_cache on CUDA.
#include "kernels/cache/update_rows.h"
#include "kernels/cuda/launch.h"

namespace mla {
namespace {

__global__ void __launch_bounds__(kUpdateThreads) claim_kernel(const __grid_constant__ UpdateCacheParams p) {
  claim_slot(p);
}

template <class Element, class Stored>
__global__ void __launch_bounds__(kUpdateThreads) update_kernel(const __grid_constant__ UpdateCacheParams p) {
  update_rows<Element, Stored>(p);
}

template <class Element>
__global__ void __launch_bounds__(kUpdateThreads) update_ds_mla_kernel(const __grid_constant__ UpdateCacheParams p) {
  update_ds_mla_rows<Element>(p);
}

template <class Element>
Error launch_update(const UpdateCacheParams& params, const Device& device) {
  LaunchShape shape;
  shape.grid = dim3((params.tokens + int64_t{kUpdateTokens} - 1) / kUpdateTokens);
  shape.block = dim3(kUpdateThreads);
  if (params.ds_mla) return launch("update_cache", update_ds_mla_kernel<Element>, shape, device, params);
  if (params.cache_dtype == params.input_dtype && params.k_scale == nullptr) {
    return launch("update_cache", update_kernel<Element, Element>, shape, device, params);
  }
  if (params.cache_dtype == DType::kE4M3FN) {
    return launch("update_cache", update_kernel<Element, E4M3FN>, shape, device, params);
  }
  return std::string("jax_mla: update_cache on CUDA cannot store ") + name_of(params.input_dtype) + " in a cache of " +
         name_of(params.cache_dtype) + (params.k_scale == nullptr ? "" : " with k_scale");
}

Error claim_slots(const UpdateCacheParams& params, const Device& device) {
  const size_t bytes = size_t{2} * params.owner_slots * sizeof(int32_t);
  const cudaError_t status = cudaMemsetAsync(params.owners, 0xFF, bytes, stream_of(device));
  if (status != cudaSuccess) {
    return device_error("jax_mla: update_cache cannot clear " + std::to_string(bytes) + " bytes", status);
  }
  LaunchShape shape;
  shape.grid = dim3((params.tokens + int64_t{kUpdateThreads} - 1) / kUpdateThreads);
  shape.block = dim3(kUpdateThreads);
  return launch("update_cache's search for duplicates", claim_kernel, shape, device, params);
}

}  // namespace

Error update_cache(const UpdateCacheParams& params, const Device& device) {
  if (params.tokens == 0) return {};
  if (params.owner_slots > 0) {
    Error error = claim_slots(params, device);
    if (!error.empty()) return error;
  }
  switch (params.input_dtype) {
    case DType::kF32: return launch_update<float>(params, device);
    case DType::kBF16: return launch_update<__nv_bfloat16>(params, device);
    case DType::kF16: return launch_update<__half>(params, device);
    default: return std::string("jax_mla: update_cache on CUDA cannot read ") + name_of(params.input_dtype);
  }
}

}  // namespace mla
