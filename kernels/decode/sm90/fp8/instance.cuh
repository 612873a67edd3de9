#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/decode/sm90/fp8/instance.h"
#include "kernels/decode/sm90/fp8/kernel.cuh"

namespace mla::sm90::fp8 {

template <class TileShape>
Error launch_shape(const DecodeParams& params, const TensorMaps& maps, const Device& device) {
  LaunchShape shape;
  shape.grid = dim3(params.plan.parts);
  shape.block = dim3(TileShape::kThreads);
  shape.shared_bytes = TileShape::kSharedBytes;
  return launch("mla_decode's Hopper kernel for fp8 caches", decode_kernel<TileShape>, shape, device, params, maps);
}

template <int kTileRows>
Error launch_instance(const DecodeParams& params, const TensorMaps& maps, const Device& device) {
  if constexpr (kTileRows >= kNativeRows) {
    if (params.q_dtype == DType::kE4M3FN) return launch_shape<Shape<kTileRows, 1>>(params, maps, device);
    if (params.q_dtype == DType::kBF16) return launch_shape<Shape<kTileRows, 2>>(params, maps, device);
  }
  return launch_shape<Shape<kTileRows>>(params, maps, device);
}

}  // namespace mla::sm90::fp8
