// mla_decode for Hopper over wide tiles, of 64 rows. A CTA runs one part of the plan; its warps have roles:
//   keys (three warps) -> full -> two warpgroups that attend (attend.cuh) -> empty -> keys
//   queries (one warp) -> query_full -> they -> query_empty
#pragma once

#include <cuda_runtime.h>

#include "kernels/decode/sm90/loads.cuh"
#include "kernels/decode/sm90/wide/attend.cuh"
#include "kernels/decode/sm90/wide/loads.cuh"

namespace mla::sm90::wide {

// By one thread. `full_arrivals`: for a slot.
__device__ __forceinline__ void init_barriers(Control& control, uint32_t full_arrivals = 1) {
  for (int i = 0; i < kSlots; ++i) {
    ptx::mbarrier_init(ptx::shared_address(&control.full[i]), full_arrivals);
    // By the group that has the chunk's columns of the output, of the rope keys by the one that has the scores.
    ptx::mbarrier_init(ptx::shared_address(&control.empty[i]), kGroupWarps * ptx::kWarpArrivals);
  }
  // The queries, and what they are.
  ptx::mbarrier_init(ptx::shared_address(&control.query_full), 1 + ptx::kWarpArrivals);
  ptx::mbarrier_init(ptx::shared_address(&control.query_empty), kAttendWarps * ptx::kWarpArrivals);
  for (auto& of_group : control.references_full) {
    for (uint64_t& barrier : of_group) ptx::mbarrier_init(ptx::shared_address(&barrier), ptx::kWarpArrivals);
  }
  ptx::fence_mbarrier_init();
}

template <class Element>
__device__ __forceinline__ void run(const DecodeParams& p, const TensorMaps& maps, unsigned char* shared) {
  const uint32_t blocks = ptx::shared_address(shared);
  const uint32_t queries = blocks + kBlocks * kBlockBytes;
  auto& control = *reinterpret_cast<Control*>(shared + kBlocks * kBlockBytes + Shape::kQueryBytes);
  ptx::launch_dependents();
  ptx::init_twins();

  // Through a shuffle the compiler knows that the warp's number is uniform.
  const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0);

  if (warp < kAttendWarps) {
    ptx::change_registers<kLaunchRegisters, kAttendRegisters>();
    ptx::barrier_sync(kStartBarrier, kThreads);
    attend_tiles<Element>(p, blocks, queries, control);
    return;
  }
  ptx::change_registers<kLaunchRegisters, kLoadRegisters>();
  if (warp == kQueryWarp) {
    ptx::barrier_sync(kStartBarrier, kThreads);
    load_queries<Shape, Items>(p, maps, queries, control);
    return;
  }
  // The warp that makes the barriers does not wait for the others, and so the first keys are on their way early. A
  // layer out of range is outside the tensor map too, and then the reduction writes empty rows over all results.
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  Items items(p);
  if (warp == kKeyWarp) {
    if (threadIdx.x % 32 == 0) {
      ptx::prefetch_tensor_map(&maps.keys);
      init_barriers(control);
    }
    __syncwarp();
    ptx::barrier_arrive(kStartBarrier, kThreads);
  } else {
    ptx::barrier_sync(kStartBarrier, kThreads);
  }
  load_keys(p, &maps.keys, items, layer, warp - kKeyWarp, blocks, control);
}

}  // namespace mla::sm90::wide

namespace mla::sm90 {

template <class Element>
__global__ void __launch_bounds__(wide::kThreads, 1)
    wide_decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_base[];
  wide::run<Element>(p, maps, shared_base);
}

}  // namespace mla::sm90
