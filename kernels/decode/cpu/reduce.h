// The second phase of decode.
#pragma once

#include "kernels/device.h"
#include "kernels/params.h"

namespace mla::cpu {

// Merges the partials of split tiles in order of tokens, and writes empty rows where no work item did.
void reduce(const DecodeParams& params, const Device& device);

}  // namespace mla::cpu
