#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/decode/sm90/fp8/instance.h"
#include "kernels/decode/sm90/fp8/kernel.cuh"
#include "kernels/decode/sm90/fp8/wide/kernel.cuh"

namespace mla::sm90::fp8 {

template <class TileShape, class Kernel>
Error launch_shape(Kernel kernel, const DecodeParams& params, const TensorMaps& maps, const Device& device) {
  LaunchShape shape;
  shape.grid = dim3(params.plan.parts);
  shape.block = dim3(TileShape::kThreads);
  shape.shared_bytes = TileShape::kSharedBytes;
  return launch("mla_decode's Hopper kernel for fp8 caches", kernel, shape, device, params, maps);
}

template <int kTileRows>
Error launch_instance(const DecodeParams& params, const TensorMaps& maps, const Device& device) {
  if constexpr (kTileRows == wide::Shape::kRows) {
    return launch_shape<wide::Shape>(wide_decode_kernel<wide::Shape>, params, maps, device);
  } else {
    return launch_shape<Shape<kTileRows>>(decode_kernel<Shape<kTileRows>>, params, maps, device);
  }
}

}  // namespace mla::sm90::fp8
