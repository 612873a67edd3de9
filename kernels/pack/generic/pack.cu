// pack_kv and pack_kv_fp8 on CUDA.
#include <limits>

#include "kernels/cuda/launch.h"
#include "kernels/pack/generic/pack_rows.cuh"
#include "kernels/pack/generic/pack_tiles.cuh"

namespace mla {
namespace {

template <class Input, class Rope, class Output>
__global__ void __launch_bounds__(kPackThreads) pack_kernel(const __grid_constant__ PackKvParams p) {
  pack_rows<Input, Rope, Output>(p);
}

template <class Input, class Rope>
__global__ void __launch_bounds__(kPackThreads, PackTileShape<Input>::kCtas)
    pack_tiles_kernel(const __grid_constant__ PackKvParams p) {
  __shared__ alignas(16) unsigned char shared[PackTileShape<Input>::kSharedBytes];
  pack_tile<Input, Rope>(p, shared);
}

// Of so many (token, head) rows, or tiles of them, of which a CTA has some.
Error launch_ctas(void (*kernel)(PackKvParams), int64_t rows, int64_t cta_rows, const PackKvParams& params,
                  const Device& device) {
  const int64_t ctas = (rows + cta_rows - 1) / cta_rows;
  if (ctas > std::numeric_limits<int32_t>::max()) {
    return "jax_mla: pack_kv's " + std::to_string(params.tokens) + " tokens of " + std::to_string(params.heads) +
           " heads are more than a grid holds";
  }
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(ctas));
  shape.block = dim3(kPackThreads);
  return launch("pack_kv", kernel, shape, device, params);
}

template <class Input, class Rope, class Output>
Error launch_pack(const PackKvParams& params, const Device& device) {
  if constexpr (std::is_same_v<Output, E4M3FN>) {
    if (params.v_tiled) {
      const int64_t tiles = (params.tokens + kValueTile - 1) / kValueTile;
      return launch_ctas(pack_tiles_kernel<Input, Rope>, tiles * params.heads, PackTileShape<Input>::kTiles, params,
                         device);
    }
  }
  return launch_ctas(pack_kernel<Input, Rope, Output>, params.tokens * params.heads,
                     PackShape<Input, Output>::kBlockRows, params, device);
}

Error refusal(const PackKvParams& p) {
  return std::string("jax_mla: pack_kv on CUDA cannot pack ") + name_of(p.input_dtype) + " with a rope key in " +
         name_of(p.k_pe_dtype) + " to " + name_of(p.output_dtype) +
         (p.v == nullptr ? ""
          : p.v_tiled    ? ", with values in tiles"
                         : ", with values");
}

template <class Input, class Output>
Error launch_rope(const PackKvParams& params, const Device& device) {
  if ((params.v != nullptr) == std::is_same_v<Input, Output>) return refusal(params);
  if (params.k_pe_dtype == params.input_dtype) return launch_pack<Input, Input, Output>(params, device);
  switch (params.k_pe_dtype) {
    case DType::kE4M3FN: return launch_pack<Input, E4M3FN, Output>(params, device);
    case DType::kE4M3FNUZ: return launch_pack<Input, E4M3FNUZ, Output>(params, device);
    default: return refusal(params);
  }
}

template <class Input>
Error launch_input(const PackKvParams& params, const Device& device) {
  if (params.v_tiled && params.output_dtype != DType::kE4M3FN) return refusal(params);
  if (params.output_dtype == params.input_dtype) return launch_rope<Input, Input>(params, device);
  switch (params.output_dtype) {
    case DType::kE4M3FN: return launch_rope<Input, E4M3FN>(params, device);
    case DType::kE4M3FNUZ: return launch_rope<Input, E4M3FNUZ>(params, device);
    default: return refusal(params);
  }
}

}  // namespace

Error pack_kv(const PackKvParams& params, const Device& device) {
  if (params.tokens * params.heads == 0) return {};
  switch (params.input_dtype) {
    case DType::kF32: return launch_input<float>(params, device);
    case DType::kBF16: return launch_input<__nv_bfloat16>(params, device);
    case DType::kF16: return launch_input<__half>(params, device);
    default: return refusal(params);
  }
}

}  // namespace mla
