// The slots that a piece of indices names, in blocks of 64: indices that name no token are left out, so that they cost
// nothing and only an item's last block can be short.
#pragma once

#include "kernels/cuda/ptx.cuh"
#include "kernels/sparse/work.cuh"

namespace mla::sparse_sm90 {

constexpr uint32_t kWholeWarp = 0xFFFFFFFF;
constexpr int kRingBlocks = 3;  // one that is filled, one that runs over into it, one that others still read

// In shared memory.
struct alignas(16) ChosenRing {
  int32_t slots[kRingBlocks * kBlockTokens];
  int32_t count[kRingBlocks];  // of a block's slots that are tokens
  int32_t last[kRingBlocks];   // of its item
};

// A place in the ring, the same in all warps that follow it.
struct ChosenPlace {
  int block = 0;

  __device__ __forceinline__ void advance() { block = block + 1 == kRingBlocks ? 0 : block + 1; }
};

// Fills the ring, by a whole warp, for one item.
class ChosenSlots {
 public:
  __device__ __forceinline__ ChosenSlots(const SparseDecodeParams& p, const Tile& piece)
      : piece_(piece), next_(piece.kv_begin) {
    read_ahead(p);
  }

  // One block more; behind an item's last slot -1. At least one block an item, be it empty.
  __device__ __forceinline__ void next_block(const SparseDecodeParams& p, ChosenPlace place, ChosenRing& ring) {
    constexpr int kEnd = kRingBlocks * kBlockTokens;
    const int lane = threadIdx.x % 32, first = place.block * kBlockTokens;
    // More than a block, or all: then it is known whether this one is the last.
    while (found_ <= kBlockTokens && next_ < piece_.kv_end) {
      const int32_t slots[2] = {ahead_[0], ahead_[1]};
      next_ += kBlockTokens;
      read_ahead(p);
#pragma unroll
      for (int32_t slot : slots) {
        const uint32_t valid = __ballot_sync(kWholeWarp, slot >= 0);
        const int at = first + found_ + __popc(valid & ((1u << lane) - 1));
        if (slot >= 0) ring.slots[at < kEnd ? at : at - kEnd] = slot;
        found_ += __popc(valid);
      }
    }
    for (int i = found_ + lane; i < kBlockTokens; i += 32) ring.slots[first + i] = -1;
    if (lane == 0) {
      ring.count[place.block] = min_of(found_, kBlockTokens);
      ring.last[place.block] = found_ <= kBlockTokens;
    }
    found_ = max_of(found_ - kBlockTokens, 0);
    __syncwarp();
  }

 private:
  // This lane's two of the next 64 indices, whose latency is hidden behind a block's copies.
  __device__ __forceinline__ void read_ahead(const SparseDecodeParams& p) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) ahead_[i] = slot_at(p, piece_, int64_t{next_} + 32 * i + lane);
  }

  Tile piece_;
  int32_t next_;       // index that the first lane has read ahead
  int32_t found_ = 0;  // slots in the ring that no block has yet
  int32_t ahead_[2];
};

// A CTA's items, which are dealt out in turn.
class SparseItems {
 public:
  __device__ __forceinline__ explicit SparseItems(const SparseDecodeParams& p)
      : next_(blockIdx.x), end_(static_cast<uint32_t>(p.tokens * SparseWork::tiles(p) * p.splits)) {}

  // False: that was the last.
  __device__ __forceinline__ bool next(const SparseDecodeParams&) {
    item_ = next_;
    next_ += gridDim.x;
    return item_ < end_;
  }

  __device__ __forceinline__ int32_t item() const { return static_cast<int32_t>(item_); }

 private:
  uint32_t next_, end_, item_ = 0;
};

}  // namespace mla::sparse_sm90
