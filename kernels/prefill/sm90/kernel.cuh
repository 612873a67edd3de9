// mla_prefill for Hopper (sm_90a): attention of up-projected queries and keys over a ragged batch, by wgmma over blocks
// that the copy engine brings. A CTA stays on its multiprocessor and takes one tile after the other. Its warps have
// roles and meet at mbarriers:
//   queries -> tile_full, query_full -> attend (two warpgroups) -> query_empty, tile_empty -> queries
//   keys -> key_full -> attend -> key_empty -> keys
//   keys -> value_full, or in a careful tile value_raw -> clear -> value_full -> attend -> value_empty -> keys
// The online softmax is FlashAttention-2's (arXiv 2307.08691), the overlap within a warpgroup FlashAttention-3's
// (arXiv 2407.08608).
#pragma once

#include <cuda_runtime.h>

#include "kernels/prefill/sm90/attend.cuh"
#include "kernels/prefill/sm90/clear.cuh"
#include "kernels/prefill/sm90/loads.cuh"

namespace mla::sm90_prefill {

// By one thread. `key_arrivals`: of the warp that brings keys, when it has read a tile.
template <int kStages>
__device__ __forceinline__ void init_barriers(Control& control, uint32_t key_arrivals) {
  const auto init = [](uint64_t& barrier, uint32_t count) { ptx::mbarrier_init(ptx::shared_address(&barrier), count); };
  for (int i = 0; i < kTiles; ++i) {
    init(control.tile_full[i], ptx::kWarpArrivals);
    init(control.tile_empty[i], (kAttendWarps + kClearWarps) * ptx::kWarpArrivals + key_arrivals);
  }
  for (int i = 0; i < kGroups; ++i) {
    init(control.query_full[i], 1);
    init(control.query_empty[i], kGroupWarps * ptx::kWarpArrivals);
  }
  for (int i = 0; i < kStages; ++i) {
    init(control.key_full[i], 1);
    init(control.key_empty[i], kAttendWarps * ptx::kWarpArrivals);
    init(control.value_full[i], kClearWarps * ptx::kWarpArrivals);
    init(control.value_empty[i], kAttendWarps * ptx::kWarpArrivals);
    init(control.value_raw[i], 1);
  }
  ptx::fence_mbarrier_init();
}

// So that what no copy brings is finite.
template <class Format>
__device__ __forceinline__ void zero_values(uint32_t memory) {
  for (int i = static_cast<int>(threadIdx.x) * 16; i < Format::kStages * Format::kValueBytes; i += kThreads * 16) {
    ptx::store_shared_16(memory + Format::kValuesAt + i, uint4{});
  }
  ptx::fence_async_proxy();
}

template <class Format, bool kKeyMask>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(const __grid_constant__ PrefillParams p, const __grid_constant__ TensorMaps maps,
                   const __grid_constant__ Schedule schedule) {
  extern __shared__ __align__(1024) unsigned char shared_base[];
  const uint32_t memory = ptx::shared_address(shared_base);
  auto& control = *reinterpret_cast<Control*>(shared_base + Format::kControlAt);

  // Through a shuffle the compiler knows that the warp's number is uniform.
  const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 32 * kKeyWarp) {
    ptx::prefetch_tensor_map(&maps.queries);
    ptx::prefetch_tensor_map(&maps.nope);
    ptx::prefetch_tensor_map(&maps.rope);
    if constexpr (!Format::kFp8Values) ptx::prefetch_tensor_map(&maps.values);
    init_barriers<Format::kStages>(control, kKeyMask ? ptx::kWarpArrivals : 1);
  }
  if constexpr (Format::kFp8Values) zero_values<Format>(memory);
  ptx::wait_for_previous_kernel();
  ptx::launch_dependents();
  ptx::init_twins();
  ptx::barrier_sync(kStartBarrier, kThreads);

  if (warp < kAttendWarps) {
    ptx::change_registers<kLaunchRegisters, kAttendRegisters>();
    attend_tiles<Format, kKeyMask>(p, memory, control);
  } else {
    ptx::change_registers<kLaunchRegisters, kLoadRegisters>();
    if (warp == kKeyWarp) {
      if (kKeyMask || threadIdx.x % 32 == 0) load_keys<Format, kKeyMask>(p, maps, memory, control);
    } else if (warp == kQueryWarp) {
      load_queries<Format>(p, schedule, &maps.queries, memory + Format::kQueriesAt, control);
    } else {
      clear_values<Format, kKeyMask>(p, memory, control);
    }
  }
}

}  // namespace mla::sm90_prefill
