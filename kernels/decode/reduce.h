#pragma once

#include "kernels/entry.h"

namespace mla {

// Merges the partials of split tiles and writes the empty rows: the second half of decode. `dependent`: the kernel in
// front of it, which writes the partials, lets it start early.
Error reduce(const DecodeParams& params, const Device& device, bool dependent);

}  // namespace mla
