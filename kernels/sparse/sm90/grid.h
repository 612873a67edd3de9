// How many CTAs share the work of a sparse Hopper kernel: one for each multiprocessor, which takes every n-th item.
#pragma once

#include <algorithm>
#include <limits>

#include "kernels/cuda/launch.h"

namespace mla::sparse_sm90 {

inline Error choose_grid(dim3* grid, const SparseDecodeParams& p, const Device& device) {
  const int64_t tiles = (p.heads + p.tile_rows - 1) / p.tile_rows, items = p.tokens * tiles * p.splits;
  if (items > std::numeric_limits<int32_t>::max()) {
    return "jax_mla: mla_sparse_decode has " + std::to_string(items) + " pieces of work, more than 32 bits count";
  }
  int32_t multiprocessors = 0;
  const Error error = device_attribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  *grid = dim3(static_cast<unsigned>(std::min<int64_t>(items, multiprocessors)));
  return error;
}

}  // namespace mla::sparse_sm90
