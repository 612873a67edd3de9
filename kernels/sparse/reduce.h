#pragma once

#include "kernels/entry.h"

namespace mla {

// Merges the partials of each row in the order of the indices: the second half of sparse decode with several splits.
// `dependent`: the kernel in front of it lets it start early.
Error sparse_reduce(const SparseDecodeParams& params, const Device& device, bool dependent);

}  // namespace mla
