#include "kernels/rocm/launch.h"

namespace mla {

Error gather_context(const GatherContextParams& params, const Device& device) {
  constexpr int32_t kRows = 16, kThreads = 128;  // of a block, as in kernels/context/gfx9/gather_rows.h
  if (params.rows == 0) return {};
  const DType output = params.output_dtype;
  if (output != DType::kF32 && output != DType::kBF16 && output != DType::kF16) {
    return std::string("jax_mla: gather_context on AMD cannot write ") + name_of(output);
  }
  LaunchShape shape;
  shape.grid.x = static_cast<uint32_t>((params.rows + kRows - 1) / kRows);
  shape.block.x = kThreads;
  const std::string symbol = std::string("mla_gather_context_") +
                             (params.ds_mla ? "ds_mla" : short_name_of(params.cache_dtype)) + "_" +
                             short_name_of(output);
  return launch({"context/gfx9/gather", symbol.c_str()}, shape, device, params);
}

}  // namespace mla
