#include "kernels/prefill/sm90/instance.cuh"

namespace mla::sm90_prefill {

template Error launch_instance<Format<E4M3FN, E4M3FN>, true>(const PrefillParams&, const TensorMaps&, const Schedule&,
                                                             int32_t, const Device&);

}  // namespace mla::sm90_prefill
