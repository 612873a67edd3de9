// mla_prefill's entry on AMD: picks the kernels for the call.
#include <string>
#include <vector>

#include "kernels/capability.h"
#include "kernels/prefill/gfx9/limits.h"
#include "kernels/prefill/gfx950/scratch.h"
#include "kernels/rocm/launch.h"

namespace mla {
namespace {

using namespace gfx9_prefill;

std::string kinds(const PrefillParams& p) {
  const std::string keys = name_of(p.dtype);
  if (p.v_tiled) return keys + " with values in tiles of " + name_of(p.v_dtype);
  return p.v_dtype == p.dtype ? keys : keys + " with values in " + name_of(p.v_dtype);
}

Error check(const PrefillParams& p, const std::string& architecture) {
  const std::vector<const char*> names = variants();
  const auto known = static_cast<int32_t>(names.size());
  if (p.variant < 0 || p.variant > known) {
    return "jax_mla: mla_prefill's variant is " + std::to_string(p.variant) + ", this module has " +
           std::to_string(known);
  }
  if (p.variant != 0 && architecture != names[p.variant - 1]) {
    return "jax_mla: mla_prefill was called for " + std::string(names[p.variant - 1]) + " and runs on " + architecture;
  }
  if (p.k_pe != nullptr) return "jax_mla: mla_prefill on AMD takes keys as one array, and has a k_pe";
  const bool fp8 = takes_fp8(p) && architecture == "gfx950";
  if (!fp8 && !takes_16_bits(p)) {
    return "jax_mla: mla_prefill on AMD takes bfloat16 and float16, and float8_e4m3fn on gfx950; this call has " +
           kinds(p) + " on " + architecture;
  }
  if (!fp8 && (p.q_scale != nullptr || p.k_scale != nullptr || p.v_scale != nullptr)) {
    return "jax_mla: q_scale, k_scale and v_scale belong to fp8, this mla_prefill has " + kinds(p);
  }
  const DType out_dtype = p.merge ? DType::kF32 : fp8 ? DType::kBF16 : p.dtype;
  if (p.out_dtype != out_dtype) {
    return "jax_mla: mla_prefill of " + kinds(p) + (p.merge ? " with a carry" : "") + " writes " + name_of(out_dtype) +
           ", out is " + name_of(p.out_dtype);
  }
  if (!counts_fit(p)) {
    return "jax_mla: mla_prefill on AMD takes up to " + std::to_string(kMostTokens) + " queries and keys, " +
           std::to_string(kMostHeads) + " heads and " + std::to_string(kMostWorkgroups) +
           " tiles of 128 queries and a head; this call has " + std::to_string(p.tokens) + " queries and " +
           std::to_string(p.stored) + " keys of " + std::to_string(p.heads) + " heads in " + std::to_string(p.batch) +
           " requests";
  }
  const int64_t scratch_bytes = prefill_scratch_bytes(p);
  if (p.scratch_bytes < scratch_bytes) {
    return "jax_mla: this mla_prefill of " + kinds(p) + " needs " + std::to_string(scratch_bytes) +
           " bytes of scratch, and has " + std::to_string(p.scratch_bytes);
  }
  return {};
}

// A workgroup a tile; those that the lengths do not fill end at once.
template <class Architecture>
Error prefill_16_bits(const PrefillParams& p, const Device& device) {
  LaunchShape shape;
  shape.grid.x = static_cast<uint32_t>(most_head_tiles<kTileQueries<Architecture>>(p) * p.heads);
  shape.block.x = Architecture::kWaves * 64;
  return p.dtype == DType::kBF16 ? launch({"prefill/gfx9/bf16", "mla_prefill_bf16"}, shape, device, p)
                                 : launch({"prefill/gfx9/f16", "mla_prefill_f16"}, shape, device, p);
}

Error prefill_fp8(const PrefillParams& p, const Device& device) {
  const fp8::Limits limits = fp8::limits_of(p);
  LaunchShape shape;
  shape.block.x = 64;
  Error error = launch({"prefill/gfx950/plan", "mla_prefill_fp8_plan"}, shape, device, p);
  if (!error.empty()) return error;
  const int64_t most_pieces = limits.pieces * p.heads;
  shape.grid.x = static_cast<uint32_t>(most_pieces < fp8::kWorkgroups ? most_pieces : fp8::kWorkgroups);
  shape.block.x = fp8::kThreads;
  error = launch({"prefill/gfx950/attention", "mla_prefill_fp8"}, shape, device, p);
  if (!error.empty() || limits.split_tiles == 0) return error;
  shape.grid = {static_cast<uint32_t>(limits.split_tiles), static_cast<uint32_t>(p.heads),
                fp8::kTileQueries / fp8::kReducedRows};
  shape.block.x = fp8::kReduceThreads;
  return launch({"prefill/gfx950/reduce", "mla_prefill_fp8_reduce"}, shape, device, p);
}

}  // namespace

Error prefill(const PrefillParams& params, const Device& device) {
  if (int64_t{params.tokens} * params.heads == 0) return {};
  const DeviceInfo* info = nullptr;
  Error error = device_info(device, &info);
  if (error.empty()) error = check(params, info->architecture);
  if (!error.empty()) return error;
  if (takes_fp8(params)) return prefill_fp8(params, device);
  return info->architecture == "gfx950" ? prefill_16_bits<Gfx950>(params, device)
                                        : prefill_16_bits<Gfx942>(params, device);
}

}  // namespace mla
