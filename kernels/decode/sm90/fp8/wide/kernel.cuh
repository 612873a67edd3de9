// mla_decode over e4m3 caches for Hopper (sm_90a), for wide tiles, of 64 rows. A CTA runs one part of the plan; its
// warps have roles and meet at mbarriers:
//   keys (one warp) -> full -> two warpgroups that attend (attend.cuh) -> empty -> keys
//   items (one thread) -> tile_full -> they -> tile_empty
#pragma once

#include "kernels/decode/sm90/fp8/kernel.cuh"
#include "kernels/decode/sm90/fp8/wide/attend.cuh"

namespace mla::sm90::fp8 {

template <class WideShape>
__global__ void __launch_bounds__(WideShape::kThreads, 1)
    wide_decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_base[];
  const uint32_t base = ptx::shared_address(shared_base);
  auto& control = *reinterpret_cast<Control<WideShape>*>(shared_base + WideShape::kControlOffset);
  ptx::launch_dependents();
  ptx::init_twins();

  // Through a shuffle the compiler knows that the warp's number is uniform.
  const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0);
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  if (layer < 0 || layer >= p.layers) return;  // the reduction writes empty rows over all results

  if (warp >= WideShape::kKeyWarp) {
    load<WideShape>(p, maps, warp, layer, base, control);
  } else {
    ptx::change_registers<WideShape::kLaunchRegisters, WideShape::kAttendRegisters>();
    ptx::barrier_sync(kStartBarrier, WideShape::kThreads);
    wide::attend_tiles<WideShape, wide::Keys, Values>(p, layer, base, shared_base + WideShape::kQueryOffset, control);
  }
}

}  // namespace mla::sm90::fp8
