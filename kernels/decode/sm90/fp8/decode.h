#pragma once

#include "kernels/entry.h"

namespace mla {

// The attention over each part, for calls that sm90::fp8::takes (limits.h), on a device of compute capability 9.0.
Error decode_sm90_fp8(const DecodeParams& params, const Device& device);

}  // namespace mla
