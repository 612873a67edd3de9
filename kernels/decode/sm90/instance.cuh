#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/decode/sm90/instance.h"
#include "kernels/decode/sm90/kernel.cuh"

namespace mla::sm90 {

template <class Element, int kTileRows>
Error launch_instance(const DecodeParams& params, const TensorMaps& maps, const Device& device) {
  using TileShape = Shape<kTileRows>;
  LaunchShape shape;
  shape.grid = dim3(params.plan.parts);
  shape.block = dim3(TileShape::kThreads);
  shape.shared_bytes = shared_bytes<TileShape>();
  return launch("mla_decode's Hopper kernel", decode_kernel<Element, TileShape>, shape, device, params, maps);
}

}  // namespace mla::sm90
