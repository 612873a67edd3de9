#include <cuda_runtime_api.h>

#include "kernels/entry.h"

namespace mla {

Error copy(void* target, const void* source, int64_t bytes, const Device& device) {
  const cudaError_t status =
      cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(device.stream));
  if (status == cudaSuccess) return {};
  return "copying " + std::to_string(bytes) + " bytes on the device failed: " + cudaGetErrorString(status);
}

}  // namespace mla
