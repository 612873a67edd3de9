// update_cache on CUDA.
#include "kernels/cache/generic/update_rows.cuh"
#include "kernels/cuda/launch.h"

namespace mla {
namespace {

template <class Element, class Stored>
__global__ void __launch_bounds__(kUpdateThreads) update_few_kernel(const __grid_constant__ UpdateCacheParams p) {
  update_few<Element, Stored>(p);
}

template <class Element, class Stored>
__global__ void __launch_bounds__(kUpdateThreads)
    update_many_kernel(const __grid_constant__ UpdateCacheParams p, int32_t claiming) {
  update_many<Element, Stored>(p, claiming);
}

template <class Element, class Stored>
__global__ void __launch_bounds__(kUpdateThreads) restore_last_kernel(const __grid_constant__ UpdateCacheParams p) {
  restore_last<Element, Stored>(p);
}

int32_t ceil_div(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

LaunchShape blocks(int32_t count) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(count));
  shape.block = dim3(kUpdateThreads);
  return shape;
}

template <class Element, class Stored>
Error launch_update(const UpdateCacheParams& params, const Device& device) {
  const int32_t storing = ceil_div(params.tokens, kUpdateWarps);
  if (params.owner_slots == 0) {
    return launch("update_cache", update_few_kernel<Element, Stored>, blocks(storing), device, params);
  }
  const int32_t claiming = ceil_div(params.tokens, kUpdateThreads);
  int32_t major = 0;
  Error error = device_attribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error.empty()) {
    error = launch("update_cache", update_many_kernel<Element, Stored>, blocks(claiming + storing), device, params,
                   claiming);
  }
  if (!error.empty()) return error;
  LaunchShape shape = blocks(kRestoreBlocks);
  shape.dependent = major >= 9;
  return launch("update_cache's last of duplicates", restore_last_kernel<Element, Stored>, shape, device, params);
}

template <class Element>
Error launch_stored(const UpdateCacheParams& params, const Device& device) {
  if (params.ds_mla) return launch_update<Element, DsMla>(params, device);
  if (params.cache_dtype == params.input_dtype && params.k_scale == nullptr) {
    return launch_update<Element, Element>(params, device);
  }
  if (params.cache_dtype == DType::kE4M3FN) return launch_update<Element, E4M3FN>(params, device);
  return std::string("jax_mla: update_cache on CUDA cannot store ") + name_of(params.input_dtype) + " in a cache of " +
         name_of(params.cache_dtype) + (params.k_scale == nullptr ? "" : " with k_scale");
}

}  // namespace

Error update_cache(const UpdateCacheParams& params, const Device& device) {
  if (params.tokens == 0) return {};
  switch (params.input_dtype) {
    case DType::kF32: return launch_stored<float>(params, device);
    case DType::kBF16: return launch_stored<__nv_bfloat16>(params, device);
    case DType::kF16: return launch_stored<__half>(params, device);
    default: return std::string("jax_mla: update_cache on CUDA cannot read ") + name_of(params.input_dtype);
  }
}

}  // namespace mla
