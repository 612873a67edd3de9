#pragma once

#include "kernels/entry.h"
#include "kernels/sparse/sm90/maps.h"

namespace mla::sparse_sm90 {

// One definition for each element type, number of heads a tile and CTAs of a cluster, in a file of its own under
// instances/.
template <class Element, int kTileRows, int kCtas = 1>
Error launch_instance(const SparseDecodeParams& params, const QueryMaps& maps, const Device& device);

}  // namespace mla::sparse_sm90
