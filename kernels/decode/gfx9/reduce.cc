#include "kernels/decode/reduce.h"

#include <limits>

#include "kernels/decode/gfx9/heads.h"
#include "kernels/rocm/launch.h"

namespace mla {

// `dependent` is CUDA's: a stream of AMD starts a kernel when the one in front of it has ended.
Error reduce(const DecodeParams& params, const Device& device, bool /*dependent*/) {
  constexpr int64_t kSlices = 8;       // of a row, as in reduce.hip
  constexpr int64_t kBlocksAUnit = 4;  // of a compute unit
  if (!gfx9::contains(gfx9::reducer_heads(), params.heads)) {
    return "jax_mla: the reduction of mla_decode on AMD does not take " + std::to_string(params.heads) + " heads";
  }
  const int64_t slices = int64_t{params.tokens} * params.heads * kSlices;
  if (slices > std::numeric_limits<int32_t>::max()) {
    return "jax_mla: the reduction of mla_decode counts with 32 bits, " + std::to_string(slices / kSlices) +
           " (token, head) rows are too many";
  }
  if (params.out_dtype != DType::kBF16 && params.out_dtype != DType::kF16) {
    return std::string("jax_mla: mla_decode on AMD cannot write ") + name_of(params.out_dtype);
  }
  const DeviceInfo* info = nullptr;
  const Error error = device_info(device, &info);
  if (!error.empty()) return error;
  // An odd number, so that each block meets all the slices of a row.
  const int64_t wave = int64_t{info->compute_units} * kBlocksAUnit - 1;
  LaunchShape shape;
  shape.grid.x = static_cast<uint32_t>(slices < wave ? slices : wave);
  shape.block.x = 256;
  const char* symbol = params.out_dtype == DType::kBF16 ? "mla_reduce_bf16" : "mla_reduce_f16";
  return launch({"decode/gfx9/reduce", symbol}, shape, device, params, static_cast<uint32_t>(slices));
}

}  // namespace mla
