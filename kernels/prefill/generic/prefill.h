#pragma once

#include "kernels/entry.h"

namespace mla {

// mla_prefill for calls that generic_prefill::takes (limits.h).
Error prefill_generic(const PrefillParams& params, const Device& device);

namespace generic_prefill {

// Its instances: one source file each, so that they compile side by side.
template <class Element>
Error launch_instance(const PrefillParams& params, const Device& device);

}  // namespace generic_prefill
}  // namespace mla
