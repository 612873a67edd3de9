// mla_decode's entry on AMD: picks the kernel for the call, launches it and then the reduction.
#include <limits>

#include "kernels/capability.h"
#include "kernels/decode/gfx9/instances.h"
#include "kernels/decode/gfx9/limits.h"
#include "kernels/decode/reduce.h"
#include "kernels/rocm/launch.h"

namespace mla {
namespace {

using gfx9::is_fp8;

Error check(const DecodeParams& p) {
  const auto known = static_cast<int32_t>(variants().size());
  if (p.variant < 0 || p.variant > known) {
    return "jax_mla: mla_decode's variant is " + std::to_string(p.variant) + ", this module has " +
           std::to_string(known);
  }
  const DType out_dtype = is_fp8(p.q_dtype) ? DType::kBF16 : p.q_dtype;
  if (p.out_dtype != out_dtype) {
    return std::string("jax_mla: mla_decode with q in ") + name_of(p.q_dtype) + " writes " + name_of(out_dtype) +
           ", out is " + name_of(p.out_dtype);
  }
  if ((p.q_scale != nullptr && !is_fp8(p.q_dtype)) || (p.k_scale != nullptr && (!is_fp8(p.cache_dtype) || p.ds_mla))) {
    return std::string("jax_mla: q_scale and k_scale belong to fp8, this mla_decode has q in ") + name_of(p.q_dtype) +
           " over a cache in " + (p.ds_mla ? "fp8_ds_mla" : name_of(p.cache_dtype));
  }
  if (p.k_scale != nullptr && p.k_scales != 1 && p.k_scales != p.layers) {
    return "jax_mla: mla_decode has " + std::to_string(p.k_scales) + " k_scales, expected 1 or one for each of " +
           std::to_string(p.layers) + " layers";
  }
  if (p.pages * p.page_size > std::numeric_limits<int32_t>::max()) {
    return "jax_mla: slots are 32-bit numbers, a cache of " + std::to_string(p.pages) + " pages of " +
           std::to_string(p.page_size) + " tokens has more";
  }
  if (p.plan.parts < 1 || p.page_size < 1 || p.max_q_len < 1) {
    return "jax_mla: mla_decode has a plan of " + std::to_string(p.plan.parts) + " parts, pages of " +
           std::to_string(p.page_size) + " tokens and max_q_len " + std::to_string(p.max_q_len) +
           "; each must be positive";
  }
  return {};
}

Error attend(const DecodeParams& p, const Device& device) {
  const DeviceInfo* info = nullptr;
  const Error error = device_info(device, &info);
  if (!error.empty()) return error;
  if (p.variant > 0 && variants()[p.variant - 1] != info->architecture) {
    return std::string("jax_mla: mla_decode's variant ") + variants()[p.variant - 1] + " cannot run on device " +
           std::to_string(device.ordinal) + ", a " + info->architecture;
  }
  const char* instance = gfx9::instance_of(p.q_dtype, p.cache_dtype, p.ds_mla, info->architecture);
  if (instance == nullptr) {
    return "jax_mla: mla_decode on " + info->architecture +
           " takes bfloat16 or float16 queries over a cache of the same or of the architecture's own 8-bit type, both "
           "in that type, or bfloat16 over fp8_ds_mla; these are " +
           name_of(p.q_dtype) + " over " + (p.ds_mla ? "fp8_ds_mla" : name_of(p.cache_dtype));
  }
  const int32_t rows = gfx9::instance_rows(p.plan.tile_rows);
  if (rows == 0) {
    return "jax_mla: mla_decode on AMD takes plans of 1 to 64 rows a tile, this one has " +
           std::to_string(p.plan.tile_rows);
  }
  LaunchShape shape;
  shape.grid.x = static_cast<uint32_t>(p.plan.parts);
  shape.block.x = gfx9::kThreads;
  const std::string object = std::string("decode/gfx9/") + instance;
  const std::string symbol = std::string("mla_decode_") + instance + "_" + std::to_string(rows);
  return launch({object.c_str(), symbol.c_str()}, shape, device, p);
}

}  // namespace

Error decode(const DecodeParams& params, const Device& device) {
  if (int64_t{params.tokens} * params.heads == 0) return {};
  Error error = check(params);
  if (error.empty()) error = attend(params, device);
  if (!error.empty()) return error;
  return reduce(params, device, /*dependent=*/false);
}

}  // namespace mla
