#include "kernels/prefill/generic/instance.cuh"

namespace mla::generic_prefill {

template Error launch_instance<__nv_bfloat16>(const PrefillParams&, const Device&);

}  // namespace mla::generic_prefill
