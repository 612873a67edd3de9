// Launches the generic decode kernel for one dtype of the cache: one source file each, so that they compile side by
// side.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/decode/generic/instance.h"
#include "kernels/decode/generic/kernel.cuh"

namespace mla {

// The most stages that fit, or 0.
template <class Cached, class Shape>
int fitting_stages(int32_t shared_limit) {
  int stages = kMaxStages;
  while (stages > 0 && shared_bytes<Cached, Shape>(stages) > static_cast<size_t>(shared_limit)) --stages;
  return stages;
}

template <class Cached, int kTileRows, int kTokens>
Error launch_shape(const DecodeParams& params, const Device& device, int stages) {
  using Shape = ShapeOf<Cached, kTileRows, kTokens>;
  static_assert(kMaxStages * kTokens <= Shape::kThreads, "a thread looks up one slot");
  LaunchShape shape;
  shape.grid = dim3(params.plan.parts);
  shape.block = dim3(Shape::kThreads);
  shape.shared_bytes = shared_bytes<Cached, Shape>(stages);
  return launch("mla_decode's generic kernel", decode_kernel<Cached, Shape>, shape, device, params, stages);
}

// Blocks of kLarge tokens where at least two fit in shared memory (a data-centre GPU), else of kSmall.
template <class Cached, int kTileRows, int kLarge, int kSmall>
Error launch_rows(const DecodeParams& params, const Device& device, int32_t shared_limit) {
  const int large = fitting_stages<Cached, ShapeOf<Cached, kTileRows, kLarge>>(shared_limit);
  if (large >= 2) return launch_shape<Cached, kTileRows, kLarge>(params, device, large);
  const int small = fitting_stages<Cached, ShapeOf<Cached, kTileRows, kSmall>>(shared_limit);
  if (small >= 2) return launch_shape<Cached, kTileRows, kSmall>(params, device, small);
  return "jax_mla: mla_decode's generic kernel needs " +
         std::to_string(shared_bytes<Cached, ShapeOf<Cached, kTileRows, kSmall>>(2)) +
         " bytes of shared memory a block, device " + std::to_string(device.ordinal) + " has " +
         std::to_string(shared_limit);
}

template <class Cached>
Error launch_generic(const DecodeParams& params, const Device& device, int32_t shared_limit) {
  // A plan for another kernel's tiles runs in the next larger instance, whose last rows then do not exist.
  const int32_t rows = params.plan.tile_rows;
  if (rows >= 1 && rows <= 16) return launch_rows<Cached, 16, 64, 32>(params, device, shared_limit);
  if (rows >= 1 && rows <= 32) return launch_rows<Cached, 32, 64, 32>(params, device, shared_limit);
  constexpr int kSmall64 = std::is_same_v<Cached, E4M3FN> ? 32 : 16;
  if (rows >= 1 && rows <= 64) return launch_rows<Cached, 64, 2 * kSmall64, kSmall64>(params, device, shared_limit);
  return "jax_mla: mla_decode's generic kernel takes plans with 1 to 64 rows a tile, this one has " +
         std::to_string(rows);
}

}  // namespace mla
