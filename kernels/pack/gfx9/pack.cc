#include <limits>

#include "kernels/rocm/launch.h"

namespace mla {
namespace {

constexpr const char* kObject = "pack/gfx9/pack";
constexpr int64_t kRows = 32, kThreads = 256;  // of a block, as in kernels/pack/gfx9/pack_rows.h

bool is_e4m3(DType dtype) { return dtype == DType::kE4M3FN || dtype == DType::kE4M3FNUZ; }

bool takes(const PackKvParams& p) {
  const bool casts = p.output_dtype != p.input_dtype;
  return !is_e4m3(p.input_dtype) && (!casts || is_e4m3(p.output_dtype)) && (p.v != nullptr) == casts &&
         (p.k_pe_dtype == p.input_dtype || is_e4m3(p.k_pe_dtype)) && (!p.v_tiled || p.output_dtype == DType::kE4M3FN);
}

Error launch_blocks(const std::string& symbol, int64_t blocks, const PackKvParams& p, const Device& device) {
  if (blocks > std::numeric_limits<int32_t>::max()) {
    return "jax_mla: pack_kv's " + std::to_string(p.tokens) + " tokens of " + std::to_string(p.heads) +
           " heads are more than a grid holds";
  }
  LaunchShape shape;
  shape.grid.x = static_cast<uint32_t>(blocks);
  shape.block.x = kThreads;
  return launch({kObject, symbol.c_str()}, shape, device, p);
}

}  // namespace

Error pack_kv(const PackKvParams& params, const Device& device) {
  if (params.tokens * params.heads == 0) return {};
  if (!takes(params)) {
    return std::string("jax_mla: pack_kv on AMD cannot pack ") + name_of(params.input_dtype) + " with a rope key in " +
           name_of(params.k_pe_dtype) + " to " + name_of(params.output_dtype) +
           (params.v == nullptr ? ""
            : params.v_tiled    ? ", with values in tiles"
                                : ", with values");
  }
  const std::string input = short_name_of(params.input_dtype);
  const std::string symbol =
      "mla_pack_kv_" + input + "_" + short_name_of(params.k_pe_dtype) + "_" + short_name_of(params.output_dtype);
  const Error error = launch_blocks(symbol, (params.tokens * params.heads + kRows - 1) / kRows, params, device);
  if (!error.empty() || !params.v_tiled) return error;
  // A thread for two columns of a tile's head.
  const int64_t threads = (params.tokens + kValueTile - 1) / kValueTile * params.heads * kNope / 2;
  return launch_blocks("mla_pack_kv_tiles_" + input, (threads + kThreads - 1) / kThreads, params, device);
}

}  // namespace mla
