#include "kernels/rocm/hip.h"

#include <dlfcn.h>

namespace mla::hip {
namespace {

// The one that the process has already, as jax's ROCm plugin brings it, else the newest that the loader finds.
void* open_library(Error& error) {
  constexpr const char* kNames[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"};
  for (const int loaded : {RTLD_NOLOAD, 0}) {
    for (const char* name : kNames) {
      if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL | loaded)) return library;
    }
  }
  error =
      "jax_mla: the HIP runtime is not on this machine: neither libamdhip64.so.7, .so.6 nor libamdhip64.so can be "
      "loaded (the last one: ";
  const char* text = dlerror();
  error += text == nullptr ? "no reason was given)" : std::string(text) + ")";
  return nullptr;
}

template <class Entry>
void find(void* library, const char* name, Entry& entry, Error& error) {
  entry = reinterpret_cast<Entry>(dlsym(library, name));
  if (entry == nullptr && error.empty()) error = std::string("jax_mla: the HIP runtime has no ") + name;
}

Runtime find_runtime() {
  static Api api{};
  Error error;
  void* library = open_library(error);
  if (library == nullptr) return {nullptr, error};
  find(library, "hipGetDevice", api.get_device, error);
  find(library, "hipSetDevice", api.set_device, error);
  find(library, "hipGetDevicePropertiesR0600", api.get_properties, error);
  find(library, "hipModuleLoadData", api.module_load_data, error);
  find(library, "hipModuleGetFunction", api.module_get_function, error);
  find(library, "hipModuleLaunchKernel", api.module_launch_kernel, error);
  find(library, "hipMemcpyAsync", api.memcpy_async, error);
  find(library, "hipMemsetAsync", api.memset_async, error);
  find(library, "hipThreadExchangeStreamCaptureMode", api.exchange_capture_mode, error);
  find(library, "hipGetErrorName", api.error_name, error);
  find(library, "hipGetErrorString", api.error_string, error);
  find(library, "hipGetLastError", api.get_last_error, error);
  return {error.empty() ? &api : nullptr, error};
}

}  // namespace

const Runtime& runtime() {
  static const Runtime found = find_runtime();
  return found;
}

Error failure(const std::string& what, Status status) {
  const Api& api = *runtime().api;
  api.get_last_error();
  return what + ": " + api.error_name(status) + ", " + api.error_string(status);
}

}  // namespace mla::hip
