#include "kernels/decode/sm90/instance.cuh"

namespace mla::sm90 {

template Error launch_instance<__nv_bfloat16, 56>(const DecodeParams&, const TensorMaps&, const Device&);

}  // namespace mla::sm90
