// Launches the generic sparse kernel for one layout of the cache: one source file each, so that they compile side by
// side.
#pragma once

#include <limits>

#include "kernels/cuda/launch.h"
#include "kernels/sparse/generic/instance.h"
#include "kernels/sparse/generic/kernel.cuh"

namespace mla::generic_sparse {

template <class Cached, class Shape>
Error launch_sparse_shape(const SparseDecodeParams& params, const Device& device, int stages) {
  static_assert(kMaxStages * Shape::kTokens <= Shape::kThreads, "a thread looks up one slot");
  const int64_t tiles = (params.heads + params.tile_rows - 1) / params.tile_rows;
  const int64_t ctas = params.tokens * tiles * params.splits;
  if (ctas > std::numeric_limits<int32_t>::max()) {
    return "jax_mla: mla_sparse_decode has " + std::to_string(ctas) + " pieces of work, more than a grid";
  }
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(ctas));
  shape.block = dim3(Shape::kThreads);
  shape.shared_bytes = shared_bytes<Cached, Shape>(stages);
  return launch("mla_sparse_decode's generic kernel", sparse_kernel<Cached, Shape>, shape, device, params, stages);
}

// Launches the kernel for kRows heads and blocks of kTokens where the heads are no more, and where at least two stages
// fit in shared memory. False: it is not for this call.
template <class Cached, int kRows, int kTokens>
bool launch_if_fits(const SparseDecodeParams& params, const Device& device, int32_t shared_limit, Error& error) {
  using Shape = ShapeOf<Cached, kRows, kTokens>;
  if (params.tile_rows > kRows) return false;
  int stages = kMaxStages;
  while (shared_bytes<Cached, Shape>(stages) > static_cast<size_t>(shared_limit)) {
    if (--stages < 2) return false;
  }
  error = launch_sparse_shape<Cached, Shape>(params, device, stages);
  return true;
}

// The fewest rows that hold the tile come first, and of these the larger blocks, which a data-centre GPU has room for.
template <class Cached>
Error launch_sparse(const SparseDecodeParams& params, const Device& device, int32_t shared_limit) {
  constexpr int kLeast = std::is_same_v<Cached, E4M3FN> ? 32 : 16;
  Error error;
  const bool launched = launch_if_fits<Cached, 16, 64>(params, device, shared_limit, error) ||
                        launch_if_fits<Cached, 16, 32>(params, device, shared_limit, error) ||
                        launch_if_fits<Cached, 32, 64>(params, device, shared_limit, error) ||
                        launch_if_fits<Cached, 32, 32>(params, device, shared_limit, error) ||
                        launch_if_fits<Cached, 64, 2 * kLeast>(params, device, shared_limit, error) ||
                        launch_if_fits<Cached, 64, kLeast>(params, device, shared_limit, error);
  if (launched) return error;
  return "jax_mla: mla_sparse_decode's generic kernel takes 1 to 64 heads a tile, not " +
         std::to_string(params.tile_rows) + ", and more shared memory than the " + std::to_string(shared_limit) +
         " bytes a block of device " + std::to_string(device.ordinal);
}

}  // namespace mla::generic_sparse
