// How many CTAs run, and how many heads side by side: from shapes alone, so that a captured launch fits all lengths.
#pragma once

#include "kernels/prefill/sm90/shape.h"

namespace mla::sm90_prefill {

// No more CTAs than tiles.
inline int32_t cta_count(const PrefillParams& p, int32_t multiprocessors) {
  const int64_t tiles = most_head_tiles<kTileQueries>(p) * p.heads;
  return static_cast<int32_t>(tiles < multiprocessors ? tiles : multiprocessors);
}

// The fewer heads, the more of their keys and values L2 holds. Causal: two rounds of tiles at least, whose long and
// short ones make up for each other. Else the heads that fit one round, or four.
inline int32_t least_group_heads(const PrefillParams& p, int32_t ctas) {
  const int32_t head_tiles = (p.tokens - 1) / kTileQueries + 1;
  if (p.causal) return (2 * ctas - 1) / head_tiles + 1;
  constexpr int32_t kLeastFullHeads = 4;
  return ctas / head_tiles > kLeastFullHeads ? ctas / head_tiles : kLeastFullHeads;
}

// With a key mask all tiles are careful ones.
inline Schedule schedule_of(const PrefillParams& p, int32_t ctas) {
  const int32_t least = least_group_heads(p, ctas);
  const int32_t groups = p.heads > least ? p.heads / least : 1;
  return {(p.heads - 1) / groups + 1, p.key_mask != nullptr ? 0 : kFastRounds};
}

}  // namespace mla::sm90_prefill
