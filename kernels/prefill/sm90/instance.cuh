#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/prefill/sm90/instance.h"
#include "kernels/prefill/sm90/kernel.cuh"

namespace mla::sm90_prefill {

template <class Format, bool kKeyMask>
Error launch_instance(const PrefillParams& params, const TensorMaps& maps, const Schedule& schedule, int32_t ctas,
                      const Device& device) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(ctas));
  shape.block = dim3(kThreads);
  shape.shared_bytes = Format::kSharedBytes;
  shape.dependent = true;
  return launch("mla_prefill's Hopper kernel", prefill_kernel<Format, kKeyMask>, shape, device, params, maps, schedule);
}

}  // namespace mla::sm90_prefill
