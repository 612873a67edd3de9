// How the entry functions launch: cudaLaunchKernelEx and its return code, as a sentence. Nothing here waits, allocates
// or asks the stream, so that launches can be captured into a graph.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "kernels/cuda/racecheck.cuh"
#include "kernels/device.h"
#include "kernels/dtype_name.h"
#include "kernels/entry.h"

namespace mla {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  bool dependent = false;  // may start before the kernel in front of it has ended (it then waits itself)
};

inline Error device_error(const std::string& what, cudaError_t status) {
  cudaGetLastError();  // else it would be reported by an unrelated call later
  return what + ": " + cudaGetErrorName(status) + ", " + cudaGetErrorString(status);
}

inline cudaStream_t stream_of(const Device& device) { return static_cast<cudaStream_t>(device.stream); }

inline Error device_attribute(int32_t* value, cudaDeviceAttr attribute, const Device& device) {
  const cudaError_t status = cudaDeviceGetAttribute(value, attribute, device.ordinal);
  if (status == cudaSuccess) return {};
  return device_error("jax_mla: attribute " + std::to_string(attribute) + " of device " +
                          std::to_string(device.ordinal) + " cannot be read",
                      status);
}

template <class... Parameters, class... Arguments>
Error launch(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape, const Device& device,
             const Arguments&... arguments) {
  constexpr size_t kDefaultSharedBytes = 48 * 1024;  // more has to be asked for
  const size_t shared_bytes = shape.shared_bytes + ptx::kTwinBytes;
  cudaError_t status = cudaSuccess;
  if (shared_bytes > kDefaultSharedBytes) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  }
  if (status == cudaSuccess) {
    cudaLaunchAttribute dependent{};
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream_of(device);
    config.attrs = &dependent;
    config.numAttrs = shape.dependent ? 1 : 0;
    status = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  }
  if (status == cudaSuccess) return {};
  return device_error("jax_mla: launching " + std::string(name) + " with grid " + std::to_string(shape.grid.x) +
                          ", block " + std::to_string(shape.block.x * shape.block.y) + " and " +
                          std::to_string(shared_bytes) + " bytes of shared memory on device " +
                          std::to_string(device.ordinal) + " failed",
                      status);
}

}  // namespace mla
