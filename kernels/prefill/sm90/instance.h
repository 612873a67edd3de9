#pragma once

#include "kernels/entry.h"
#include "kernels/prefill/sm90/format.cuh"

namespace mla::sm90_prefill {

// One definition for each format, with and without a key mask, in a file of its own under instances/.
template <class Format, bool kKeyMask>
Error launch_instance(const PrefillParams& params, const TensorMaps& maps, const Schedule& schedule, int32_t ctas,
                      const Device& device);

}  // namespace mla::sm90_prefill
