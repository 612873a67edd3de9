#pragma once

#include "kernels/decode/sm90/fp8/shape.h"
#include "kernels/entry.h"

namespace mla::sm90::fp8 {

// One definition for each number of rows a tile, in a file of its own under instances/.
template <int kTileRows>
Error launch_instance(const DecodeParams& params, const TensorMaps& maps, const Device& device);

}  // namespace mla::sm90::fp8
