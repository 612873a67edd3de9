// What the Hopper kernel takes.
#pragma once

#include "kernels/prefill/sm90/shape.h"

namespace mla::sm90_prefill {

// A scale that is not positive would turn a mask's -inf into something else.
inline bool takes(const PrefillParams& p) {
  return (p.dtype == DType::kBF16 || p.dtype == DType::kF16) && p.scale > 0 && p.tokens <= kMostTokens &&
         p.stored <= kMostTokens && most_head_tiles<kTileQueries>(p) * p.heads <= kMostTokens;
}

}  // namespace mla::sm90_prefill
