// How a token's indices are cut into pieces, on every platform.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace mla {

struct Piece {
  int32_t begin, end;  // of K
};

// Piece `split` of `splits`, in whole blocks; the last ones may be shorter, or empty.
#if defined(__CUDACC__)
__host__ __device__
#endif
    constexpr Piece piece_of(int32_t topk, int32_t splits, int32_t split) {
  const int32_t blocks = topk / kBlockTokens + (topk % kBlockTokens != 0);
  const int32_t a_piece = (blocks + splits - 1) / splits;
  const int64_t begin = int64_t{split} * a_piece * kBlockTokens, end = begin + int64_t{a_piece} * kBlockTokens;
  return {static_cast<int32_t>(begin < topk ? begin : topk), static_cast<int32_t>(end < topk ? end : topk)};
}

}  // namespace mla
