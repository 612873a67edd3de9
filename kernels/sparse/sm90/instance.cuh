#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/sparse/sm90/grid.h"
#include "kernels/sparse/sm90/instance.h"
#include "kernels/sparse/sm90/kernel.cuh"

namespace mla::sparse_sm90 {

template <class Element, int kTileRows>
Error launch_instance(const SparseDecodeParams& params, const QueryMaps& maps, const Device& device) {
  LaunchShape shape;
  shape.block = dim3(Layout<kTileRows>::kThreads);
  shape.shared_bytes = Memory<Layout<kTileRows>>::kBytes;
  const Error error = choose_grid(&shape.grid, params, device);
  if (!error.empty()) return error;
  return launch("mla_sparse_decode's Hopper kernel", sparse_kernel<Element, kTileRows>, shape, device, params, maps);
}

}  // namespace mla::sparse_sm90
