#include "kernels/decode/sm90/fp8/instance.cuh"

namespace mla::sm90::fp8 {

template Error launch_instance<64>(const DecodeParams&, const TensorMaps&, const Device&);

}  // namespace mla::sm90::fp8
