#include "kernels/rocm/launch.h"

namespace mla {

Error merge_states(const MergeStatesParams& params, const Device& device) {
  constexpr uint32_t kThreads = 256;
  if (params.rows == 0) return {};
  if (params.dtype != DType::kF32 && params.dtype != DType::kBF16 && params.dtype != DType::kF16) {
    return std::string("jax_mla: merge_states on AMD cannot merge ") + name_of(params.dtype);
  }
  const int32_t vector = params.dtype == DType::kF32 ? 4 : 8;  // elements of 16 bytes
  const bool narrow = params.width % vector != 0;
  const int32_t groups = narrow ? params.width : params.width / vector;
  LaunchShape shape;
  shape.block.x = groups < 1 ? 1 : groups < static_cast<int32_t>(kThreads) ? groups : kThreads;
  shape.block.y = kThreads / shape.block.x;
  shape.grid.x = static_cast<uint32_t>((params.rows + shape.block.y - 1) / shape.block.y);
  const std::string symbol = std::string("mla_merge_states_") + short_name_of(params.dtype) + (narrow ? "_narrow" : "");
  return launch({"merge/gfx9/merge", symbol.c_str()}, shape, device, params);
}

}  // namespace mla
