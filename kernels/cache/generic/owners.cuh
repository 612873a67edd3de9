// The last token of each slot, in a hash table of tokens that nobody has to clear.
//
// An entry is a token, of which slot_mapping tells the slot: so an entry that names a token claims nothing that is not
// true, whatever was in the scratch before. It holds if it lies within reach of where its slot's search begins; all
// others are free. A held entry keeps its slot for good, so that all tokens of a slot pass the same entries and meet at
// the same one, where the last of them stays.
#pragma once

#include "kernels/gpu.h"
#include "kernels/params.h"

namespace mla {

__device__ __forceinline__ bool in_cache(const UpdateCacheParams& p, int32_t slot) {
  return slot >= 0 && slot < p.pages * p.page_size;
}

struct Owners {
  static constexpr uint32_t kReach = 64;  // entries that a search looks at

  const UpdateCacheParams& p;

  // The entries are a power of two, the scratch's every word; the last one is no place of the table.
  __device__ uint32_t mask() const { return 2 * static_cast<uint32_t>(p.owner_slots) - 1; }

  __device__ uint32_t home(int32_t slot) const {
    const uint32_t mixed = static_cast<uint32_t>(slot) * 0x9E3779B1u;  // 2^32 / golden ratio: Fibonacci hashing
    return (mixed ^ mixed >> 15) & mask();
  }

  // -1: it names no token.
  __device__ int32_t slot_of(int32_t entry) const {
    return static_cast<uint32_t>(entry) < static_cast<uint32_t>(p.tokens) ? p.slot_mapping[entry] : -1;
  }

  // Entries change beside the L1, where another kernel's changes may not be seen.
  __device__ int32_t read(uint32_t place) const { return __ldcg(p.owners + place); }

  __device__ bool is_free(int32_t entry, uint32_t place) const {
    const int32_t slot = slot_of(entry);
    return !in_cache(p, slot) || ((place - home(slot)) & mask()) >= kReach;
  }

  // A token that a later one supersedes, if there is any; it is checked likewise.
  __device__ int32_t* superseded() const { return p.owners + mask(); }

  __device__ bool has_duplicates() const {
    const int32_t token = __ldcg(superseded()), slot = slot_of(token);
    return in_cache(p, slot) && !owned_by(slot, token);
  }

  __device__ void claim(int32_t slot, int32_t token) const {
#pragma unroll 1
    for (uint32_t tries = 0; tries < kReach; ++tries) {
      const uint32_t place = (home(slot) + tries) & mask();
      if (place == mask()) continue;
      int32_t entry = read(place);
      while (is_free(entry, place)) {
        const int32_t found = atomicCAS(p.owners + place, entry, token);
        if (found == entry) return;
        entry = found;
      }
      if (slot_of(entry) != slot) continue;
      if (entry != token) *superseded() = min(entry, token);
      if (entry < token) atomicMax(p.owners + place, token);
      return;
    }
    if (has_later(slot, token)) *superseded() = token;
  }

  // After all claims.
  __device__ bool owned_by(int32_t slot, int32_t token) const {
#pragma unroll 1
    for (uint32_t tries = 0; tries < kReach; ++tries) {
      const uint32_t place = (home(slot) + tries) & mask();
      if (place == mask()) continue;
      const int32_t entry = read(place);
      if (entry == token) return true;
      if (slot_of(entry) == slot) return false;
    }
    return !has_later(slot, token);  // its reach is full of other slots
  }

  __device__ bool has_later(int32_t slot, int32_t token) const {
    for (int32_t later = token + 1; later < p.tokens; ++later) {
      if (p.slot_mapping[later] == slot) return true;
    }
    return false;
  }
};

}  // namespace mla
