#pragma once

#include "kernels/entry.h"

namespace mla {

// The attention of mla_sparse_decode on compute capability 9.0, for calls that sparse_sm90::takes.
Error sparse_sm90_decode(const SparseDecodeParams& params, const Device& device);

}  // namespace mla
