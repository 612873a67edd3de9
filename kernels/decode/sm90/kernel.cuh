// mla_decode for Hopper (sm_90a): wgmma over blocks of the paged cache, which the copy engine keeps in flight.
//
// The operands of narrow tiles are swapped: S^T[64 tokens x N] = K Q^T and O^T[512 x N] += V^T P^T have the (query,
// head) rows of a tile on the side of the instruction that takes any multiple of 8, so that 24 rows cost 24 and not 64.
// A CTA runs one part of the plan. Its warps have roles and meet at mbarriers:
//   keys (one warp) -> full -> scores (two warpgroups, in turn) -> weights_full -> output (two) -> empty -> keys
//   queries (one warp) -> query_full -> scores -> query_empty; scores -> sums_full -> output -> sums_empty
// Wide tiles, of 64 rows, have another kernel (wide/kernel.cuh).
// The online softmax is FlashAttention-2's (arXiv 2307.08691), the absorbed form DeepSeek-V2's (arXiv 2405.04434).
#pragma once

#include <cuda_runtime.h>

#include "kernels/decode/sm90/loads.cuh"
#include "kernels/decode/sm90/output.cuh"
#include "kernels/decode/sm90/scores.cuh"

namespace mla::sm90 {

// By one thread. `full_arrivals`: for a slot.
template <class Shape>
__device__ __forceinline__ void init_barriers(Control<Shape>& control, uint32_t full_arrivals = 1) {
  for (int i = 0; i < Shape::kSlots; ++i) {
    ptx::mbarrier_init(ptx::shared_address(&control.full[i]), full_arrivals);
    ptx::mbarrier_init(ptx::shared_address(&control.empty[i]), kOutputWarps * ptx::kWarpArrivals);
  }
  // The queries, and what they are.
  ptx::mbarrier_init(ptx::shared_address(&control.query_full), 1 + ptx::kWarpArrivals);
  ptx::mbarrier_init(ptx::shared_address(&control.query_empty), Shape::kScoreWarps * ptx::kWarpArrivals);
  for (uint64_t& barrier : control.weights_full) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), kGroupWarps * ptx::kWarpArrivals);
  }
  ptx::mbarrier_init(ptx::shared_address(&control.sums_full), kGroupWarps * ptx::kWarpArrivals);
  ptx::mbarrier_init(ptx::shared_address(&control.sums_empty), kOutputWarps * ptx::kWarpArrivals);
  ptx::fence_mbarrier_init();
}

template <class Element, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_base[];
  const uint32_t ring = ptx::shared_address(shared_base);
  const uint32_t queries = ring + Shape::kSlots * kSlotBytes;
  auto& control = *reinterpret_cast<Control<Shape>*>(shared_base + Shape::kSlots * kSlotBytes + Shape::kQueryBytes);
  ptx::launch_dependents();
  ptx::init_twins();

  // Through a shuffle the compiler knows that the warp's number is uniform.
  const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0);

  if (warp >= Shape::kKeyWarp) {
    ptx::change_registers<Shape::kLaunchRegisters, Shape::kLoadRegisters>();
    // The warp that makes the barriers does not wait for the others, and so the first keys are on their way early.
    if (warp == Shape::kKeyWarp) {
      // A layer out of range is outside the tensor map too, and then the reduction writes empty rows over all results.
      const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
      Items items(p);
      if (threadIdx.x % 32 == 0) {
        ptx::prefetch_tensor_map(&maps.keys);
        init_barriers(control);
      }
      __syncwarp();
      ptx::barrier_arrive(kStartBarrier, Shape::kThreads);
      load_keys(p, &maps.keys, items, layer, ring, control);
    } else {
      ptx::barrier_sync(kStartBarrier, Shape::kThreads);
      if (warp == Shape::kQueryWarp) load_queries<Shape, Items>(p, maps, queries, control);
    }
  } else if (warp < Shape::kScoreWarps) {
    ptx::change_registers<Shape::kLaunchRegisters, Shape::kScoreRegisters>();
    ptx::barrier_sync(kStartBarrier, Shape::kThreads);
    score_tiles<Element>(p, ring, queries, control);
  } else {
    ptx::change_registers<Shape::kLaunchRegisters, Shape::kOutputRegisters>();
    ptx::barrier_sync(kStartBarrier, Shape::kThreads);
    accumulate_tiles<Element>(p, ring, control);
  }
}

}  // namespace mla::sm90
