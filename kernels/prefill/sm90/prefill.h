#pragma once

#include "kernels/entry.h"

namespace mla {

// mla_prefill for calls that sm90_prefill::takes (limits.h), on a device of compute capability 9.0.
Error prefill_sm90(const PrefillParams& params, const Device& device);

}  // namespace mla
