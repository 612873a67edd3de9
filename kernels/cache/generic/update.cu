// update_cache on CUDA.
#include "kernels/cache/generic/update_rows.cuh"
#include "kernels/cuda/launch.h"

namespace mla {
namespace {

__global__ void __launch_bounds__(kClaimThreads) claim_kernel(const __grid_constant__ UpdateCacheParams p) {
  claim_slot(p);
}

template <class Element, class Stored>
__global__ void __launch_bounds__(kUpdateThreads) update_kernel(const __grid_constant__ UpdateCacheParams p) {
  update_rows<Element, Stored>(p);
}

LaunchShape shape_of(int64_t tokens, int64_t a_block, int threads) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>((tokens + a_block - 1) / a_block));
  shape.block = dim3(threads);
  return shape;
}

template <class Element, class Stored>
Error launch_update(const UpdateCacheParams& params, const Device& device, bool dependent) {
  LaunchShape shape = shape_of(params.tokens, UpdateShape<Element>::kBlockTokens, kUpdateThreads);
  shape.dependent = dependent;
  return launch("update_cache", update_kernel<Element, Stored>, shape, device, params);
}

// `dependent`: on the kernel that claims slots, in front of it.
template <class Element>
Error launch_stored(const UpdateCacheParams& params, const Device& device, bool dependent) {
  if (params.ds_mla) return launch_update<Element, DsMla>(params, device, dependent);
  if (params.cache_dtype == params.input_dtype && params.k_scale == nullptr) {
    return launch_update<Element, Element>(params, device, dependent);
  }
  if (params.cache_dtype == DType::kE4M3FN) return launch_update<Element, E4M3FN>(params, device, dependent);
  return std::string("jax_mla: update_cache on CUDA cannot store ") + name_of(params.input_dtype) + " in a cache of " +
         name_of(params.cache_dtype) + (params.k_scale == nullptr ? "" : " with k_scale");
}

Error claim_slots(const UpdateCacheParams& params, const Device& device) {
  return launch("update_cache's search for duplicates", claim_kernel,
                shape_of(params.tokens, kClaimThreads, kClaimThreads), device, params);
}

}  // namespace

Error update_cache(const UpdateCacheParams& params, const Device& device) {
  if (params.tokens == 0) return {};
  bool dependent = false;
  if (params.owner_slots > 0) {
    int32_t major = 0;
    Error error = device_attribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error.empty()) error = claim_slots(params, device);
    if (!error.empty()) return error;
    dependent = major >= 9;
  }
  switch (params.input_dtype) {
    case DType::kF32: return launch_stored<float>(params, device, dependent);
    case DType::kBF16: return launch_stored<__nv_bfloat16>(params, device, dependent);
    case DType::kF16: return launch_stored<__half>(params, device, dependent);
    default: return std::string("jax_mla: update_cache on CUDA cannot read ") + name_of(params.input_dtype);
  }
}

}  // namespace mla
