// The warps that bring chosen tokens of 16-bit caches. Tokens lie wherever their slots say, so the copy engine, which
// swizzles whole boxes alone, would take a copy for every token and chunk; cp.async puts any 16 bytes in their place.
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/sparse/sm90/shape.h"

namespace mla::sparse_sm90 {

// Slots whose copies are on their way, of which nobody knows yet. A thread waits for its own copies before it shows
// them to the tensor cores, and so speaks of a slot when later ones have been asked for.
template <class Layout>
class InFlight {
 public:
  __device__ __forceinline__ explicit InFlight(uint32_t full) : full_(full) {}

  // The copies since the last call are the next slot's.
  __device__ __forceinline__ void add() {
    ptx::cp_async_commit();
    if (++count_ <= kMost) return;
    ptx::cp_async_wait<kMost>();
    announce();
  }

  // Before a wait for readers, who may need any of these slots.
  __device__ __forceinline__ void finish() {
    ptx::cp_async_wait<0>();
    while (count_ > 0) announce();
  }

 private:
  static constexpr int kMost = 4;  // slots: 70 to 100 kB

  __device__ __forceinline__ void announce() {
    ptx::fence_async_proxy();
    ptx::mbarrier_arrive_warp(full_ + oldest_ * 8);
    oldest_ = oldest_ + 1 == Layout::kSlots ? 0 : oldest_ + 1;
    --count_;
  }

  uint32_t full_;
  int oldest_ = 0, count_ = 0;
};

// By the key warps; the first of them reads the indices for all.
template <class Layout>
__device__ __forceinline__ void load_tokens(const SparseDecodeParams& p, int warp, uint32_t ring,
                                            typename Layout::Control& control, ChosenRing& chosen) {
  const unsigned char* const layer = layer_of(p, kTokenBytes);
  const uint32_t full = ptx::shared_address(control.full), empty = ptx::shared_address(control.empty);
  InFlight<Layout> in_flight(full);
  ChosenPlace place;
  int slot = 0;
  uint32_t parity = 0;  // of the ring's current round

  SparseItems items(p);
  while (items.next(p)) {
    ChosenSlots indices(p, warp == 0 ? tile_of(p, SparseWork(p, items.item())) : Tile{});
    for (bool last = false; !last; place.advance()) {
      if (warp == 0) indices.next_block(p, place, chosen);
      ptx::barrier_sync(kListBarrier, kKeyThreads);
      last = chosen.last[place.block];
#pragma unroll 1
      for (int i = 0; i < Layout::kBlockSlots; ++i) {
        const uint32_t slot_empty = empty + slot * 8;
        const bool free = ptx::mbarrier_done(slot_empty, parity ^ 1);
        if (!__any_sync(kWholeWarp, free)) in_flight.finish();
        ptx::mbarrier_wait(slot_empty, parity ^ 1);
        if (i == 0 && warp == 0 && threadIdx.x % 32 == 0) Layout::announce(control, slot);
        Layout::copy(layer, chosen.slots + place.block * kBlockTokens, i, ring + slot * Layout::kSlotBytes, warp);
        in_flight.add();
        if (++slot == Layout::kSlots) {
          slot = 0;
          parity ^= 1;
        }
      }
    }
  }
  in_flight.finish();
}

}  // namespace mla::sparse_sm90
