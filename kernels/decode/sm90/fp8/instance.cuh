#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/decode/sm90/fp8/instance.h"
#include "kernels/decode/sm90/fp8/kernel.cuh"

namespace mla::sm90::fp8 {

template <int kTileRows>
Error launch_instance(const DecodeParams& params, const TensorMaps& maps, const Device& device) {
  using TileShape = Shape<kTileRows>;
  LaunchShape shape;
  shape.grid = dim3(params.plan.parts);
  shape.block = dim3(TileShape::kThreads);
  shape.shared_bytes = TileShape::kSharedBytes;
  return launch("mla_decode's Hopper kernel for fp8 caches", decode_kernel<TileShape>, shape, device, params, maps);
}

}  // namespace mla::sm90::fp8
