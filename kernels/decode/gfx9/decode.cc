// mla_decode's entry on AMD: picks the kernel for the call, launches it and then the reduction.
#include "kernels/capability.h"
#include "kernels/decode/check.h"
#include "kernels/decode/gfx9/instances.h"
#include "kernels/decode/gfx9/limits.h"
#include "kernels/decode/reduce.h"
#include "kernels/rocm/launch.h"

namespace mla {
namespace {

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
           name_of(p.q_dtype) + " over " + cache_name(p);
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
  Error error = check_decode(params);
  if (error.empty()) error = attend(params, device);
  if (!error.empty()) return error;
  return reduce(params, device, /*dependent=*/false);
}

}  // namespace mla
