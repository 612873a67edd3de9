// mla_sparse_decode for Hopper (sm_90a) over fp8 caches, with a scale or with fp8_ds_mla's: the warps that attend are
// those of dense decode over e4m3 (kernels/decode/sm90/fp8), which make fp16 of the cached bytes in registers.
//   tokens (three warps) -> full -> scores (one or two warpgroups) and output (two) -> empty -> tokens
//   scores -> weights_full -> output -> weights_empty -> scores
//   items (one warp) -> tile_full -> scores -> tile_empty; scores -> sums_full -> output -> sums_empty
// Of wide tiles two warpgroups do all that scores and output do.
#pragma once

#include <cuda_runtime.h>

#include "kernels/decode/sm90/fp8/kernel.cuh"
#include "kernels/decode/sm90/fp8/wide/attend.cuh"
#include "kernels/sparse/sm90/fp8/loads.cuh"
#include "kernels/sparse/sm90/fp8/tokens.cuh"

namespace mla::sparse_sm90 {

// The warps from kKeyWarp on.
template <class Shape>
__device__ __forceinline__ void load(const SparseDecodeParams& p, int warp, uint32_t base,
                                     sm90::fp8::Control<Shape>& control, ChosenRing& chosen) {
  ptx::change_registers<Shape::kLaunchRegisters, Shape::kLoadRegisters>();
  if (warp == Shape::kKeyWarp && threadIdx.x % 32 == 0) {
    if constexpr (Shape::kPreparesScales) {
      for (int i = 0; i < Shape::kSlots; ++i) {
        ptx::mbarrier_init(base + Shape::kScaledOffset + i * 8, ptx::kWarpArrivals);
      }
    }
    sm90::fp8::init_barriers<Shape>(control);
  }
  ptx::barrier_sync(sm90::fp8::kStartBarrier, Shape::kThreads);
  if (warp == Shape::kKeyWarp + fp8::kTokenWarps) {
    fp8::announce_items<Shape>(p, base, control);
  } else {
    fp8::load_tokens<Shape>(p, warp - Shape::kKeyWarp, base, control, chosen);
  }
}

// The layer that is asked for, or any: what is not in the cache has no tokens.
__device__ __forceinline__ int32_t layer_of_scales(const SparseDecodeParams& p) {
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  return layer < 0 || layer >= p.layers ? 0 : layer;
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) fp8_sparse_kernel(const __grid_constant__ SparseDecodeParams p) {
  extern __shared__ __align__(1024) unsigned char shared_base[];
  const uint32_t base = ptx::shared_address(shared_base);
  auto& control = *reinterpret_cast<sm90::fp8::Control<Shape>*>(shared_base + Shape::kControlOffset);
  auto& chosen = *reinterpret_cast<ChosenRing*>(shared_base + Shape::kChosenOffset);
  ptx::launch_dependents();
  ptx::init_twins();

  // Through a shuffle the compiler knows that the warp's number is uniform.
  const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp >= Shape::kKeyWarp) {
    load<Shape>(p, warp, base, control, chosen);
  } else if (warp >= Shape::kScoreWarps) {
    ptx::change_registers<Shape::kLaunchRegisters, Shape::kOutputRegisters>();
    ptx::barrier_sync(sm90::fp8::kStartBarrier, Shape::kThreads);
    sm90::fp8::accumulate_tiles<Shape, fp8::Values<Shape>>(p, base, control);
  } else {
    ptx::change_registers<Shape::kLaunchRegisters, Shape::kScoreRegisters>();
    ptx::barrier_sync(sm90::fp8::kStartBarrier, Shape::kThreads);
    sm90::fp8::score_tiles<Shape, fp8::Keys<typename Shape::Layout>>(p, layer_of_scales(p), base,
                                                                     shared_base + Shape::kQueryOffset, control);
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    wide_fp8_sparse_kernel(const __grid_constant__ SparseDecodeParams p) {
  extern __shared__ __align__(1024) unsigned char shared_base[];
  const uint32_t base = ptx::shared_address(shared_base);
  auto& control = *reinterpret_cast<sm90::fp8::Control<Shape>*>(shared_base + Shape::kControlOffset);
  auto& chosen = *reinterpret_cast<ChosenRing*>(shared_base + Shape::kChosenOffset);
  ptx::launch_dependents();
  ptx::init_twins();

  const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp >= Shape::kKeyWarp) {
    load<Shape>(p, warp, base, control, chosen);
  } else {
    ptx::change_registers<Shape::kLaunchRegisters, Shape::kAttendRegisters>();
    ptx::barrier_sync(sm90::fp8::kStartBarrier, Shape::kThreads);
    sm90::fp8::wide::attend_tiles<Shape, fp8::WideKeys<typename Shape::Layout>, fp8::Values<Shape>>(
        p, layer_of_scales(p), base, shared_base + Shape::kQueryOffset, control);
  }
}

}  // namespace mla::sparse_sm90
