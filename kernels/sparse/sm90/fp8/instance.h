#pragma once

#include "kernels/entry.h"

namespace mla::sparse_sm90::fp8 {

// One definition for each layout of the cache and number of heads a tile, in a file of its own under instances/.
template <class Layout, int kTileRows>
Error launch_instance(const SparseDecodeParams& params, const Device& device);

}  // namespace mla::sparse_sm90::fp8
