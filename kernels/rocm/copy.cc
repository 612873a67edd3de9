#include "kernels/entry.h"
#include "kernels/rocm/hip.h"

namespace mla {

Error copy(void* target, const void* source, int64_t bytes, const Device& device) {
  const hip::Runtime& runtime = hip::runtime();
  if (runtime.api == nullptr) return runtime.error;
  const hip::Status status =
      runtime.api->memcpy_async(target, source, static_cast<size_t>(bytes), hip::kDeviceToDevice, device.stream);
  if (status == hip::kSuccess) return {};
  return hip::failure(
      "jax_mla: copying " + std::to_string(bytes) + " bytes on device " + std::to_string(device.ordinal) + " failed",
      status);
}

}  // namespace mla
