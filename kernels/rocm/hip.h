// The HIP runtime's functions that the module uses, by their C ABI. The library is found at first use, so that the
// module builds without ROCm and is imported on any machine.
//
// What is declared here is as HIP 6 and 7 have it (hip_runtime_api.h of github.com/ROCm/HIP): names, values, and of the
// properties of a device the offsets of the two members that are read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/entry.h"

namespace mla::hip {

using Status = int;  // hipError_t
constexpr Status kSuccess = 0;

using Stream = void*;    // hipStream_t
using Module = void*;    // hipModule_t
using Function = void*;  // hipFunction_t

enum MemcpyKind : int { kDeviceToDevice = 3 };                  // hipMemcpyKind
enum CaptureMode : int { kCaptureRelaxed = 2 };                 // hipStreamCaptureMode
inline void* const kLaunchBuffer = reinterpret_cast<void*>(1);  // HIP_LAUNCH_PARAM_BUFFER_POINTER
inline void* const kLaunchBytes = reinterpret_cast<void*>(2);   // HIP_LAUNCH_PARAM_BUFFER_SIZE
inline void* const kLaunchEnd = reinterpret_cast<void*>(3);     // HIP_LAUNCH_PARAM_END

// hipDeviceProp_tR0600. Larger than any known one, for members that may yet come.
struct Properties {
  static constexpr size_t kComputeUnitsAt = 388;   // multiProcessorCount
  static constexpr size_t kArchitectureAt = 1160;  // gcnArchName, [256]
  alignas(8) char bytes[8192];
};

struct Api {
  Status (*get_device)(int* ordinal);
  Status (*set_device)(int ordinal);
  Status (*get_properties)(Properties* properties, int ordinal);
  Status (*module_load_data)(Module* module, const void* image);
  Status (*module_get_function)(Function* function, Module module, const char* name);
  Status (*module_launch_kernel)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                 unsigned block_y, unsigned block_z, unsigned lds_bytes, Stream stream,
                                 void** parameters, void** extra);
  Status (*memcpy_async)(void* target, const void* source, size_t bytes, MemcpyKind kind, Stream stream);
  Status (*memset_async)(void* target, int value, size_t bytes, Stream stream);
  Status (*exchange_capture_mode)(CaptureMode* mode);  // of this thread
  const char* (*error_name)(Status status);
  const char* (*error_string)(Status status);
  Status (*get_last_error)();  // and forget it
};

// The runtime, or why there is none. The same answer in each call, from any thread.
struct Runtime {
  const Api* api;  // null: see error
  Error error;
};
const Runtime& runtime();

// A sentence about a call that failed; the runtime forgets the error, else an unrelated call would report it.
Error failure(const std::string& what, Status status);

}  // namespace mla::hip
