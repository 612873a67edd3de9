// What the AMD kernels take.
#pragma once

#include "kernels/prefill/gfx9/shape.h"

namespace mla::gfx9_prefill {

// A block's offsets from its first key fit 32 bits.
constexpr int32_t kMostHeads = 1 << 16;
// A launch counts threads with 32 bits.
constexpr int64_t kMostWorkgroups = 1 << 22;

inline bool counts_fit(const PrefillParams& p) {
  return p.tokens <= kMostTokens && p.stored <= kMostTokens && p.heads <= kMostHeads &&
         most_head_tiles<kTileQueries<Gfx950>>(p) * p.heads <= kMostWorkgroups;
}

// On both architectures.
inline bool takes_16_bits(const PrefillParams& p) {
  return (p.dtype == DType::kBF16 || p.dtype == DType::kF16) && p.v_dtype == p.dtype;
}

// On gfx950.
inline bool takes_fp8(const PrefillParams& p) {
  return p.dtype == DType::kE4M3FN && p.v_dtype == DType::kE4M3FN && !p.v_tiled;
}

}  // namespace mla::gfx9_prefill
