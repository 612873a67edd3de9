// Memory that a call needs besides its results.
#pragma once

#include "kernels/prefill/gfx9/limits.h"
#include "kernels/prefill/gfx950/shape.h"

namespace mla {

// The least PrefillParams::scratch_bytes, from shapes and dtypes alone: at most 71 MB, a few KB where requests are
// short. 0: none.
inline int64_t prefill_scratch_bytes(const PrefillParams& p) {
  if (!gfx9_prefill::takes_fp8(p) || int64_t{p.tokens} * p.heads == 0) return 0;
  return gfx9_prefill::fp8::limits_of(p).bytes;
}

}  // namespace mla
