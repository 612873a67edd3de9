// What the Hopper kernel takes.
#pragma once

#include "kernels/prefill/sm90/shape.h"

namespace mla::sm90_prefill {

// A scale that is not positive would turn a mask's -inf into something else; with e4m3 the queries take its sign.
inline bool takes_kinds(const PrefillParams& p) {
  if (p.dtype == DType::kE4M3FN) return p.v_dtype == (p.v_tiled ? DType::kE4M3FN : DType::kBF16);
  return !p.v_tiled && (p.dtype == DType::kBF16 || p.dtype == DType::kF16) && p.v_dtype == p.dtype && p.scale > 0;
}

inline bool takes(const PrefillParams& p) {
  return takes_kinds(p) && p.tokens <= kMostTokens && p.stored <= kMostTokens &&
         most_head_tiles<kTileQueries>(p) * p.heads <= kMostTokens;
}

}  // namespace mla::sm90_prefill
