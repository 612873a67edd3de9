// The items of a CTA's part of the plan.
#pragma once

#include "kernels/decode/work.cuh"

namespace mla {

// A part's items in turn. The first is guessed before it is known where the part begins: a plan of as many items as
// parts, as those of small batches are, then costs one latency of memory less.
class Items {
 public:
  __device__ __forceinline__ explicit Items(const DecodeParams& p) {
    const int32_t guess = min_of(static_cast<int32_t>(blockIdx.x), p.plan.max_items - 1);
    item_ = read_item(p, guess);
    next_ = max_of(p.plan.part_offsets[blockIdx.x], 0);
    last_ = min_of(p.plan.part_offsets[blockIdx.x + 1], p.plan.max_items);
    guessed_ = guess == next_;
  }

  // False: that was the last.
  __device__ __forceinline__ bool next(const DecodeParams& p) {
    if (next_ >= last_) return false;
    if (!guessed_) item_ = read_item(p, next_);
    guessed_ = false;
    ++next_;
    return true;
  }

  __device__ __forceinline__ const WorkItem& item() const { return item_; }

 private:
  WorkItem item_;
  int32_t next_, last_;
  bool guessed_;
};

}  // namespace mla
