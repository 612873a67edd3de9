#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/sparse/sm90/fp8/instance.h"
#include "kernels/sparse/sm90/fp8/kernel.cuh"
#include "kernels/sparse/sm90/grid.h"

namespace mla::sparse_sm90::fp8 {

template <class TileShape, class Kernel>
Error launch_shape(Kernel kernel, const SparseDecodeParams& params, const Device& device) {
  LaunchShape shape;
  shape.block = dim3(TileShape::kThreads);
  shape.shared_bytes = TileShape::kSharedBytes;
  const Error error = choose_grid(&shape.grid, params, device);
  if (!error.empty()) return error;
  return launch("mla_sparse_decode's Hopper kernel for fp8 caches", kernel, shape, device, params);
}

template <class Layout, int kTileRows>
Error launch_instance(const SparseDecodeParams& params, const Device& device) {
  if constexpr (is_wide<kTileRows>) {
    return launch_shape<WideShape<Layout>>(wide_fp8_sparse_kernel<WideShape<Layout>>, params, device);
  } else {
    using TileShape = Shape<Layout, kTileRows>;
    return launch_shape<TileShape>(fp8_sparse_kernel<TileShape>, params, device);
  }
}

}  // namespace mla::sparse_sm90::fp8
