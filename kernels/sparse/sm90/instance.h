#pragma once

#include "kernels/entry.h"
#include "kernels/sparse/sm90/maps.h"

namespace mla::sparse_sm90 {

// One definition for each element type and number of heads a tile, in a file of its own under instances/.
template <class Element, int kTileRows>
Error launch_instance(const SparseDecodeParams& params, const QueryMaps& maps, const Device& device);

}  // namespace mla::sparse_sm90
