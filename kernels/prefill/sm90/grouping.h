// How many CTAs run, and how many heads side by side: from shapes alone, so that a captured launch fits all lengths.
#pragma once

#include "kernels/prefill/sm90/shape.h"

#if !defined(MLA_PREFILL_ROUNDS)
#define MLA_PREFILL_ROUNDS 2
#endif
#if !defined(MLA_PREFILL_FULL_ROUNDS)
#define MLA_PREFILL_FULL_ROUNDS 1
#endif

namespace mla::sm90_prefill {

// No more CTAs than tiles.
inline int32_t cta_count(const PrefillParams& p, int32_t multiprocessors) {
  const int64_t tiles = most_head_tiles<kTileQueries>(p) * p.heads;
  return static_cast<int32_t>(tiles < multiprocessors ? tiles : multiprocessors);
}

// As few heads as make three rounds of tiles: the fewer, the more of their keys and values L2 holds.
inline Schedule schedule_of(const PrefillParams& p, int32_t ctas) {
  const int32_t rounds = p.causal ? MLA_PREFILL_ROUNDS : MLA_PREFILL_FULL_ROUNDS;
  const int32_t head_tiles = (p.tokens - 1) / kTileQueries + 1;
  const int32_t least = (rounds * ctas - 1) / head_tiles + 1;
  const int32_t groups = p.heads > least ? p.heads / least : 1;
  return {(p.heads - 1) / groups + 1};
}

}  // namespace mla::sm90_prefill
