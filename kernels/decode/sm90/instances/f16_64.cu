#include "kernels/decode/sm90/instance.cuh"

namespace mla::sm90 {

template Error launch_instance<__half, 64>(const DecodeParams&, const TensorMaps&, const Device&);

}  // namespace mla::sm90
