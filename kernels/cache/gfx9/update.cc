#include "kernels/rocm/launch.h"

namespace mla {
namespace {

constexpr const char* kObject = "cache/gfx9/update";
constexpr uint32_t kThreads = 256;           // as kUpdateThreads in kernels/cache/gfx9/update_rows.h
constexpr uint32_t kTokens = kThreads / 64;  // a block

bool is_e4m3(DType dtype) { return dtype == DType::kE4M3FN || dtype == DType::kE4M3FNUZ; }

LaunchShape shape_of(int64_t threads_or_waves, uint32_t a_block) {
  LaunchShape shape;
  shape.grid.x = static_cast<uint32_t>((threads_or_waves + a_block - 1) / a_block);
  shape.block.x = kThreads;
  return shape;
}

Error claim_slots(const UpdateCacheParams& params, const Device& device) {
  const hip::Runtime& runtime = hip::runtime();
  if (runtime.api == nullptr) return runtime.error;
  const size_t bytes = size_t{2} * params.owner_slots * sizeof(int32_t);
  const hip::Status status = runtime.api->memset_async(params.owners, 0xFF, bytes, device.stream);
  if (status != hip::kSuccess) {
    return hip::failure("jax_mla: update_cache cannot clear " + std::to_string(bytes) + " bytes", status);
  }
  return launch({kObject, "mla_update_cache_claim"}, shape_of(params.tokens, kThreads), device, params);
}

}  // namespace

Error update_cache(const UpdateCacheParams& params, const Device& device) {
  if (params.tokens == 0) return {};
  const bool copied = params.cache_dtype == params.input_dtype && params.k_scale == nullptr;
  const bool converts = is_e4m3(params.cache_dtype) && !(params.ds_mla && params.k_scale != nullptr);
  if (is_e4m3(params.input_dtype) || !(copied || converts)) {
    return std::string("jax_mla: update_cache on AMD cannot store ") + name_of(params.input_dtype) + " in a cache of " +
           (params.ds_mla ? "fp8_ds_mla" : name_of(params.cache_dtype)) +
           (params.k_scale == nullptr ? "" : " with k_scale");
  }
  if (params.owner_slots > 0) {
    const Error error = claim_slots(params, device);
    if (!error.empty()) return error;
  }
  const std::string symbol = std::string("mla_update_cache_") + short_name_of(params.input_dtype) + "_" +
                             (params.ds_mla ? "ds_mla" : short_name_of(params.cache_dtype));
  return launch({kObject, symbol.c_str()}, shape_of(params.tokens, kTokens), device, params);
}

}  // namespace mla
