#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/decode/sm90/instance.h"
#include "kernels/decode/sm90/kernel.cuh"
#include "kernels/decode/sm90/wide/kernel.cuh"

namespace mla::sm90 {

template <class Element, int kTileRows>
Error launch_instance(const DecodeParams& params, const TensorMaps& maps, const Device& device) {
  constexpr const char* kName = "mla_decode's Hopper kernel";
  LaunchShape shape;
  shape.grid = dim3(params.plan.parts);
  if constexpr (kTileRows == wide::kRows) {
    shape.block = dim3(wide::kThreads);
    shape.shared_bytes = wide::kSharedBytes;
    return launch(kName, wide_decode_kernel<Element>, shape, device, params, maps);
  } else {
    using TileShape = Shape<kTileRows>;
    shape.block = dim3(TileShape::kThreads);
    shape.shared_bytes = shared_bytes<TileShape>();
    return launch(kName, decode_kernel<Element, TileShape>, shape, device, params, maps);
  }
}

}  // namespace mla::sm90
