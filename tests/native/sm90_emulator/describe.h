// Tensor maps for the emulated copy engine.
#pragma once

#include <initializer_list>

#include "tests/native/sm90_emulator/machine.h"

namespace mla::emulator {

struct Axis {
  int64_t size, stride;  // in bytes
  int32_t box;
};

inline void describe(CUtensorMap* map, const void* data, std::initializer_list<Axis> axes, int32_t element_bytes = 2) {
  TensorMap tensor{};
  tensor.element_bytes = element_bytes;
  tensor.data = static_cast<const char*>(data);
  for (const Axis& axis : axes) {
    tensor.sizes[tensor.rank] = axis.size;
    tensor.strides[tensor.rank] = axis.stride;
    tensor.boxes[tensor.rank++] = axis.box;
  }
  std::memcpy(static_cast<void*>(map), &tensor, sizeof(tensor));
}

}  // namespace mla::emulator
