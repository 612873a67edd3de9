#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/sparse/sm90/fp8/instance.h"
#include "kernels/sparse/sm90/fp8/kernel.cuh"
#include "kernels/sparse/sm90/grid.h"

namespace mla::sparse_sm90::fp8 {

template <class Layout, int kTileRows>
Error launch_instance(const SparseDecodeParams& params, const Device& device) {
  using TileShape = Shape<Layout, kTileRows>;
  LaunchShape shape;
  shape.block = dim3(TileShape::kThreads);
  shape.shared_bytes = TileShape::kSharedBytes;
  const Error error = choose_grid(&shape.grid, params, device);
  if (!error.empty()) return error;
  return launch("mla_sparse_decode's Hopper kernel for fp8 caches", fp8_sparse_kernel<TileShape>, shape, device,
                params);
}

}  // namespace mla::sparse_sm90::fp8
