// What the generic kernel takes.
#pragma once

#include "kernels/prefill/generic/shape.h"

namespace mla::generic_prefill {

inline bool takes(const PrefillParams& p) {
  return (p.dtype == DType::kBF16 || p.dtype == DType::kF16) && p.v_dtype == p.dtype && p.tokens <= kMostTokens &&
         p.stored <= kMostTokens && most_head_tiles<kTileQueries>(p) * p.heads <= kMostTokens;
}

}  // namespace mla::generic_prefill
