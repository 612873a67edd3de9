// How the entry functions launch: a kernel of an embedded code object, with its parameters by value, on the stream of a
// device; what fails comes back as a sentence. Nothing here waits, allocates on the device or asks the stream, so that
// launches can be captured into a graph. The one exception is a kernel's first launch on a device, which loads its
// code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "kernels/device.h"
#include "kernels/dtype_name.h"
#include "kernels/entry.h"
#include "kernels/rocm/hip.h"

namespace mla {

struct Kernel {
  const char* object;  // its source below kernels/, without .hip: "decode/gfx9/plan"
  const char* symbol;  // the name of the extern "C" function
};

struct Dim3 {
  uint32_t x = 1, y = 1, z = 1;
};

struct LaunchShape {
  Dim3 grid;               // blocks
  Dim3 block;              // threads
  uint32_t lds_bytes = 0;  // dynamic, beyond what the kernel declares
};

struct DeviceInfo {
  std::string architecture;  // "gfx942": gcnArchName up to its first colon
  int32_t compute_units;
};

// Asked once a device.
Error device_info(const Device& device, const DeviceInfo** info);

// `arguments`: the parameters as the kernel finds them, each aligned as its type asks for.
Error launch_packed(const Kernel& kernel, const LaunchShape& shape, const Device& device, void* arguments,
                    size_t bytes);

// Parameters of a kernel, placed as the code object's ABI has them: in order, each at a multiple of its alignment.
class Arguments {
 public:
  template <class Argument>
  void add(const Argument& argument) {
    bytes_ = (bytes_ + alignof(Argument) - 1) / alignof(Argument) * alignof(Argument);
    std::memcpy(place_ + bytes_, &argument, sizeof(Argument));
    bytes_ += sizeof(Argument);
  }
  void* data() { return place_; }
  size_t bytes() const { return bytes_; }

  static constexpr size_t kMostBytes = 1024;

 private:
  alignas(16) char place_[kMostBytes] = {};
  size_t bytes_ = 0;
};

template <class... Parameters>
Error launch(const Kernel& kernel, const LaunchShape& shape, const Device& device, const Parameters&... parameters) {
  static_assert((0 + ... + (sizeof(Parameters) + alignof(Parameters))) <= Arguments::kMostBytes);
  Arguments arguments;
  (arguments.add(parameters), ...);
  return launch_packed(kernel, shape, device, arguments.data(), arguments.bytes());
}

}  // namespace mla
