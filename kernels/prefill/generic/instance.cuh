#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/prefill/generic/kernel.cuh"
#include "kernels/prefill/generic/prefill.h"

namespace mla::generic_prefill {

template <class Element>
Error launch_instance(const PrefillParams& params, const Device& device) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(most_head_tiles<kTileQueries>(params) * params.heads));
  shape.block = dim3(kThreads);
  shape.shared_bytes = kSharedBytes;
  return launch("mla_prefill", prefill_kernel<Element>, shape, device, params);
}

}  // namespace mla::generic_prefill
