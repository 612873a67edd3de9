// mla_sparse_decode's entry on AMD: picks the kernel for the cache, launches it and then the reduction.
#include <limits>

#include "kernels/capability.h"
#include "kernels/decode/gfx9/instances.h"
#include "kernels/decode/gfx9/limits.h"
#include "kernels/rocm/launch.h"

namespace mla {
namespace {

using gfx9::is_fp8;

Error check(const SparseDecodeParams& p) {
  const auto known = static_cast<int32_t>(variants().size());
  if (p.variant < 0 || p.variant > known) {
    return "jax_mla: mla_sparse_decode's variant is " + std::to_string(p.variant) + ", this module has " +
           std::to_string(known);
  }
  const DType out_dtype = is_fp8(p.q_dtype) ? DType::kBF16 : p.q_dtype;
  if (p.out_dtype != out_dtype) {
    return std::string("jax_mla: mla_sparse_decode with q in ") + name_of(p.q_dtype) + " writes " + name_of(out_dtype) +
           ", out is " + name_of(p.out_dtype);
  }
  if ((p.q_scale != nullptr && !is_fp8(p.q_dtype)) || (p.k_scale != nullptr && (!is_fp8(p.cache_dtype) || p.ds_mla))) {
    return "jax_mla: q_scale and k_scale of mla_sparse_decode belong to fp8 queries and per-tensor fp8 caches";
  }
  if (p.k_scale != nullptr && p.k_scales != 1 && p.k_scales != p.layers) {
    return "jax_mla: mla_sparse_decode has " + std::to_string(p.k_scales) +
           " k_scales, expected 1 or one for each of " + std::to_string(p.layers) + " layers";
  }
  if (p.splits < 1 || p.tile_rows < 1 || p.topk < 0 || p.slots < 0) {
    return "jax_mla: mla_sparse_decode has " + std::to_string(p.splits) + " splits and tiles of " +
           std::to_string(p.tile_rows) + " heads; each must be positive";
  }
  if (p.slots > std::numeric_limits<int32_t>::max()) {
    return "jax_mla: slots are 32-bit numbers, a cache of " + std::to_string(p.slots) + " has more";
  }
  return {};
}

Error launch_blocks(const std::string& object, const std::string& symbol, int64_t blocks, const SparseDecodeParams& p,
                    const Device& device) {
  if (blocks > std::numeric_limits<int32_t>::max()) {
    return "jax_mla: mla_sparse_decode's " + std::to_string(blocks) + " workgroups are more than a grid holds";
  }
  LaunchShape shape;
  shape.grid.x = static_cast<uint32_t>(blocks);
  shape.block.x = gfx9::kThreads;
  return launch({object.c_str(), symbol.c_str()}, shape, device, p);
}

Error attend(const SparseDecodeParams& p, const Device& device) {
  const DeviceInfo* info = nullptr;
  const Error error = device_info(device, &info);
  if (!error.empty()) return error;
  if (p.variant > 0 && variants()[p.variant - 1] != info->architecture) {
    return std::string("jax_mla: mla_sparse_decode's variant ") + variants()[p.variant - 1] + " cannot run on device " +
           std::to_string(device.ordinal) + ", a " + info->architecture;
  }
  const char* instance = gfx9::instance_of(p.q_dtype, p.cache_dtype, p.ds_mla, info->architecture);
  if (instance == nullptr) {
    return "jax_mla: mla_sparse_decode on " + info->architecture +
           " takes bfloat16 or float16 queries over a cache of the same or of the architecture's own 8-bit type, both "
           "in that type, or bfloat16 over fp8_ds_mla; these are " +
           name_of(p.q_dtype) + " over " + (p.ds_mla ? "fp8_ds_mla" : name_of(p.cache_dtype));
  }
  const int32_t rows = gfx9::instance_rows(p.tile_rows);
  if (rows == 0) {
    return "jax_mla: mla_sparse_decode on AMD takes tiles of 1 to 64 heads, these have " + std::to_string(p.tile_rows);
  }
  const int64_t tiles = (p.heads + int64_t{p.tile_rows} - 1) / p.tile_rows;
  const std::string name = instance;
  return launch_blocks("sparse/gfx9/" + name, "mla_sparse_decode_" + name + "_" + std::to_string(rows),
                       tiles * p.tokens * p.splits, p, device);
}

}  // namespace

Error sparse_decode(const SparseDecodeParams& params, const Device& device) {
  const int64_t rows = int64_t{params.tokens} * params.heads;
  if (rows == 0) return {};
  Error error = check(params);
  if (error.empty()) error = attend(params, device);
  if (!error.empty() || params.splits == 1) return error;
  constexpr int64_t kRows = gfx9::kThreads / 64;  // of a block of the reduction, a wave each
  const char* symbol = params.out_dtype == DType::kBF16 ? "mla_sparse_reduce_bf16" : "mla_sparse_reduce_f16";
  return launch_blocks("sparse/gfx9/reduce", symbol, (rows + kRows - 1) / kRows, params, device);
}

}  // namespace mla
