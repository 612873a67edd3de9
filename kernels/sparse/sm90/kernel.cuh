// mla_sparse_decode for Hopper (sm_90a) over bf16 and fp16 caches: the warps that attend are those of dense decode
// (kernels/decode/sm90), narrow tiles with swapped operands and wide ones, and other warps bring the tokens.
//   key warps (three) -> full -> scores, output, or two warpgroups that attend -> empty -> key warps
//   a query warp -> query_full -> scores, or they -> query_empty
#pragma once

#include <cuda_runtime.h>

#include "kernels/decode/sm90/kernel.cuh"
#include "kernels/decode/sm90/wide/kernel.cuh"
#include "kernels/sparse/sm90/loads.cuh"
#include "kernels/sparse/sm90/maps.h"

namespace mla::sparse_sm90 {

// The warpgroup that loads.
template <class Layout>
__device__ __forceinline__ void load(const SparseDecodeParams& p, const QueryMaps& maps, int warp,
                                     unsigned char* shared) {
  auto& control = *reinterpret_cast<typename Layout::Control*>(shared + Memory<Layout>::kControlOffset);
  auto& chosen = *reinterpret_cast<ChosenRing*>(shared + Memory<Layout>::kChosenOffset);
  const uint32_t ring = ptx::shared_address(shared);
  if (warp == 0 && threadIdx.x % 32 == 0) {
    init_barriers(control, 32 * kKeyWarps);
    Layout::announce(control);
  }
  ptx::barrier_sync(sm90::kStartBarrier, Layout::kThreads);
  if (warp == kQueryWarp) {
    sm90::load_queries<typename Layout::Shape, SparseItems>(p, maps, ring + Memory<Layout>::kQueryOffset, control);
  } else {
    load_tokens<Layout>(p, warp, ring, control, chosen);
  }
}

template <class Element, int kTileRows>
__device__ __forceinline__ void run_narrow(const SparseDecodeParams& p, const QueryMaps& maps, unsigned char* shared) {
  using Layout = Narrow<kTileRows>;
  using Shape = typename Layout::Shape;
  auto& control = *reinterpret_cast<typename Layout::Control*>(shared + Memory<Layout>::kControlOffset);
  const uint32_t ring = ptx::shared_address(shared);
  const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp >= Layout::kFirstLoadWarp) {
    ptx::change_registers<Shape::kLaunchRegisters, Shape::kLoadRegisters>();
    load<Layout>(p, maps, warp - Layout::kFirstLoadWarp, shared);
  } else if (warp < Shape::kScoreWarps) {
    ptx::change_registers<Shape::kLaunchRegisters, Shape::kScoreRegisters>();
    ptx::barrier_sync(sm90::kStartBarrier, Layout::kThreads);
    sm90::score_tiles<Element>(p, ring, ring + Memory<Layout>::kQueryOffset, control);
  } else {
    ptx::change_registers<Shape::kLaunchRegisters, Shape::kOutputRegisters>();
    ptx::barrier_sync(sm90::kStartBarrier, Layout::kThreads);
    sm90::accumulate_tiles<Element>(p, ring, control);
  }
}

template <class Element>
__device__ __forceinline__ void run_wide(const SparseDecodeParams& p, const QueryMaps& maps, unsigned char* shared) {
  namespace wide = sm90::wide;
  using Layout = Wide;
  auto& control = *reinterpret_cast<typename Layout::Control*>(shared + Memory<Layout>::kControlOffset);
  const uint32_t ring = ptx::shared_address(shared);
  const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp >= Layout::kFirstLoadWarp) {
    ptx::change_registers<wide::kLaunchRegisters, Layout::kLoadRegisters>();
    load<Layout>(p, maps, warp - Layout::kFirstLoadWarp, shared);
  } else {
    ptx::change_registers<wide::kLaunchRegisters, Layout::kAttendRegisters>();
    ptx::barrier_sync(sm90::kStartBarrier, Layout::kThreads);
    wide::attend_tiles<Element, Layout>(p, ring, ring + Memory<Layout>::kQueryOffset, control);
  }
}

template <int kTileRows>
using Layout = std::conditional_t<kTileRows == sm90::wide::kRows, Wide, Narrow<kTileRows>>;

template <class Element, int kTileRows>
__global__ void __launch_bounds__(Layout<kTileRows>::kThreads, 1)
    sparse_kernel(const __grid_constant__ SparseDecodeParams p, const __grid_constant__ QueryMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_base[];
  ptx::launch_dependents();
  ptx::init_twins();
  if constexpr (kTileRows == sm90::wide::kRows) {
    run_wide<Element>(p, maps, shared_base);
  } else {
    run_narrow<Element, kTileRows>(p, maps, shared_base);
  }
}

}  // namespace mla::sparse_sm90
