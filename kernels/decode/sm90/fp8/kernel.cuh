// mla_decode over e4m3 caches for Hopper (sm_90a): fp8 is what travels and what shared memory holds, fp16 is what is
// multiplied.
//
// As for 16-bit caches the operands are swapped: S^T[64 tokens x N] = K Q^T and O^T[512 x N] += V^T P^T. The left ones
// come from registers, where the keys' bytes become fp16 in the layout that the product wants: nothing is written back
// to shared memory, and a product with N = 24 takes 13 cycles instead of 22.
// A CTA runs one part of the plan. Its warps have roles and meet at mbarriers:
//   keys (one warp) -> full -> scores (one or two warpgroups) and output (two) -> empty -> keys
//   scores -> weights_full -> output -> weights_empty -> scores
//   items (one thread) -> tile_full -> scores -> tile_empty; scores -> sums_full -> output -> sums_empty
#pragma once

#include <cuda_runtime.h>

#include "kernels/decode/sm90/fp8/loads.cuh"
#include "kernels/decode/sm90/fp8/output.cuh"
#include "kernels/decode/sm90/fp8/scores.cuh"

namespace mla::sm90::fp8 {

// By one thread.
template <class Shape>
__device__ __forceinline__ void init_barriers(Control<Shape>& control) {
  for (int i = 0; i < Shape::kSlots; ++i) {
    ptx::mbarrier_init(ptx::shared_address(&control.full[i]), 1);
    ptx::mbarrier_init(ptx::shared_address(&control.empty[i]), Shape::kSlotReaders * ptx::kWarpArrivals);
  }
  ptx::mbarrier_init(ptx::shared_address(&control.tile_full), 1);
  ptx::mbarrier_init(ptx::shared_address(&control.tile_empty), kGroupWarps * ptx::kWarpArrivals);
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(ptx::shared_address(&control.weights_full[i]), kGroupWarps * ptx::kWarpArrivals);
    ptx::mbarrier_init(ptx::shared_address(&control.weights_empty[i]), kOutputWarps * ptx::kWarpArrivals);
  }
  ptx::mbarrier_init(ptx::shared_address(&control.sums_full), kGroupWarps * ptx::kWarpArrivals);
  ptx::mbarrier_init(ptx::shared_address(&control.sums_empty), kOutputWarps * ptx::kWarpArrivals);
  ptx::fence_mbarrier_init();
}

// The warps from kKeyWarp on.
template <class Shape>
__device__ __forceinline__ void load(const DecodeParams& p, const TensorMaps& maps, int warp, int32_t layer,
                                     uint32_t base, Control<Shape>& control) {
  ptx::change_registers<Shape::kLaunchRegisters, Shape::kLoadRegisters>();
  // The warp that makes the barriers does not wait for the others, and so the first keys are on their way early.
  if (warp == Shape::kKeyWarp) {
    Items items(p);
    if (threadIdx.x % 32 == 0) {
      ptx::prefetch_tensor_map(&maps.latent);
      ptx::prefetch_tensor_map(&maps.rope);
      init_barriers<Shape>(control);
    }
    __syncwarp();
    ptx::barrier_arrive(kStartBarrier, Shape::kThreads);
    load_keys<Shape>(p, maps, items, layer, base, control);
  } else {
    ptx::barrier_sync(kStartBarrier, Shape::kThreads);
    if (warp == Shape::kItemWarp && threadIdx.x % 32 == 0) announce_items<Shape>(p, control);
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_base[];
  const uint32_t base = ptx::shared_address(shared_base);
  auto& control = *reinterpret_cast<Control<Shape>*>(shared_base + Shape::kControlOffset);
  ptx::launch_dependents();
  ptx::init_twins();

  // Through a shuffle the compiler knows that the warp's number is uniform.
  const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0);
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  if (layer < 0 || layer >= p.layers) return;  // the reduction writes empty rows over all results

  if (warp >= Shape::kKeyWarp) {
    load<Shape>(p, maps, warp, layer, base, control);
  } else if (warp >= Shape::kScoreWarps) {
    ptx::change_registers<Shape::kLaunchRegisters, Shape::kOutputRegisters>();
    ptx::barrier_sync(kStartBarrier, Shape::kThreads);
    accumulate_tiles<Shape, Values>(p, base, control);
  } else {
    ptx::change_registers<Shape::kLaunchRegisters, Shape::kScoreRegisters>();
    ptx::barrier_sync(kStartBarrier, Shape::kThreads);
    score_tiles<Shape, KeyLines>(p, layer, base, shared_base + Shape::kQueryOffset, control);
  }
}

}  // namespace mla::sm90::fp8
