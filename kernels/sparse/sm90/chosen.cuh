// The slots that a piece of indices names, in blocks of 64: indices that name no token are left out, so that they cost
// nothing and only an item's last block can be short.
#pragma once

#include "kernels/cuda/hopper.cuh"
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

// A CTA's items, which are dealt out in turn.
class SparseItems {
 public:
  __device__ __forceinline__ explicit SparseItems(const SparseDecodeParams&) : next_(blockIdx.x) {}

  // False: that was the last.
  __device__ __forceinline__ bool next(const SparseDecodeParams& p) {
    const uint32_t item = next_;
    next_ += gridDim.x;
    return item < static_cast<uint32_t>(p.tokens * SparseWork::tiles(p) * p.splits);
  }

  __device__ __forceinline__ int32_t item() const { return static_cast<int32_t>(next_ - gridDim.x); }

 private:
  uint32_t next_;
};

// The blocks of a CTA's items, as the key warps go through them together. The first of them writes down the slots, for
// all. kAhead: a block ahead, while the others bring the block before, where a multiprocessor waits for memory; else
// when a block is wanted, so that the first warp's own copies do not come later than the others'.
template <int kBarrier, int kWarps, bool kAhead>
class ChosenBlocks {
 public:
  // `writer`: the caller is of the first warp.
  __device__ __forceinline__ ChosenBlocks(bool writer, ChosenRing& ring) : ring_(ring), writer_(writer) {}

  __device__ __forceinline__ void begin_item(const SparseDecodeParams& p, int32_t item) {
    if (!writer_) return;
    const Tile piece = tile_of(p, SparseWork(p, item));
    indices_ = p.indices + int64_t{piece.request} * p.topk + piece.kv_begin + threadIdx.x % 32;
    left_ = piece.kv_end - piece.kv_begin;
    found_ = 0;
    read_ahead();
    if (kAhead) write_block(p, behind(block_));
  }

  // The item's next block; at least one an item, be it empty.
  __device__ __forceinline__ void next(const SparseDecodeParams& p) {
    if (!kAhead && writer_) write_block(p, behind(block_));
    // Its slots are there, and nobody reads the last one's any more, which the next ones may run over.
    ptx::barrier_sync(kBarrier, 32 * kWarps);
    block_ = behind(block_);
    if (kAhead && writer_ && !last()) write_block(p, behind(block_));
  }

  // Of the block. Slots: of tokens, behind an item's last one -1.
  __device__ __forceinline__ const int32_t* slots() const { return ring_.slots + block_ * kBlockTokens; }
  __device__ __forceinline__ int32_t count() const { return ring_.count[block_]; }
  __device__ __forceinline__ bool last() const { return ring_.last[block_]; }

 private:
  static __device__ __forceinline__ int behind(int block) { return block + 1 == kRingBlocks ? 0 : block + 1; }

  // By the first warp.
  __device__ __forceinline__ void write_block(const SparseDecodeParams& p, int block) {
    constexpr int kEnd = kRingBlocks * kBlockTokens;
    const int lane = threadIdx.x % 32, first = block * kBlockTokens;
    // More than a block, or all: then it is known whether this one is the last.
    while (found_ <= kBlockTokens && left_ > 0) {
      const int32_t slots[2] = {slot_of(p, ahead_[0]), slot_of(p, ahead_[1])};
      indices_ += kBlockTokens;
      left_ -= kBlockTokens;
      read_ahead();
#pragma unroll
      for (int32_t slot : slots) {
        const uint32_t valid = __ballot_sync(kWholeWarp, slot >= 0);
        const int at = first + found_ + __popc(valid & ((1u << lane) - 1));
        if (slot >= 0) ring_.slots[at < kEnd ? at : at - kEnd] = slot;
        found_ += __popc(valid);
      }
    }
    const bool last = found_ <= kBlockTokens;
    if (last) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (lane + 32 * i >= found_) ring_.slots[first + lane + 32 * i] = -1;
      }
    }
    if (lane == 0) {
      ring_.count[block] = min_of(found_, kBlockTokens);
      ring_.last[block] = last;
    }
    found_ -= kBlockTokens;
  }

  // This lane's two of the next 64 indices. Nobody looks at them before the next block is written, so that their
  // latency is hidden behind a block's copies.
  __device__ __forceinline__ void read_ahead() {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) ahead_[i] = 32 * i + lane < left_ ? indices_[32 * i] : -1;
  }

  ChosenRing& ring_;
  bool writer_;
  int block_ = kRingBlocks - 1;

  const int32_t* indices_;  // the next of the item, that this lane has read ahead
  int32_t left_;            // of them in the item
  int32_t found_;           // slots in the ring that no block has yet
  int32_t ahead_[2];
};

}  // namespace mla::sparse_sm90
