// A HIP runtime for tests on a machine without a GPU: the entry points that the ROCm module and its driver use.
// Memory is the host's, streams are synchronous, and a launch is handed to whoever runs it (tests/test_rocm.py: the
// emulator of tests/gfx9). It refuses what the real runtime refuses: code for another architecture, kernels that are
// not in the code, launches on another device than the code was loaded for; and what it is told to.
#include "tests/native/hip_standin.h"

#include <elf.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

enum Status : int {  // of hipError_t
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidDevice = 101,
  kNoBinaryForGpu = 209,
  kNotFound = 500,
  kLaunchFailure = 719,
  kStreamCaptureUnsupported = 900,
};

struct DeviceModel {
  std::string architecture = "gfx942:sramecc+:xnack-";
  int compute_units = 4;
};

struct Code {
  int ordinal;
  std::vector<char> image;
};

struct KernelOfCode {
  const Code* code;
  std::string name;
};

struct Standin {
  std::mutex mutex;
  StandinLauncher launcher = nullptr;
  std::vector<DeviceModel> devices = std::vector<DeviceModel>(1);
  std::map<std::string, int> refused;
  std::map<std::string, int64_t> calls;
  std::map<uint64_t, uint64_t> allocations;
  std::vector<std::unique_ptr<Code>> codes;
  std::vector<std::unique_ptr<KernelOfCode>> kernels;
};

Standin& standin() {
  static Standin all;
  return all;
}

thread_local int current_device = 0;
thread_local bool captures = false;
thread_local int capture_mode = 0;  // 0: global, 1: thread-local, 2: relaxed
thread_local int last_error = kSuccess;

// Counts the call; what it was told to return.
int enter(const char* entry) {
  std::lock_guard<std::mutex> lock(standin().mutex);
  ++standin().calls[entry];
  const auto refused = standin().refused.find(entry);
  return last_error = refused == standin().refused.end() ? kSuccess : refused->second;
}

int fail(int status) { return last_error = status; }

// Of the ELF header's flags: the machine that the code is for.
std::string architecture_of(const Elf64_Ehdr& header) {
  switch (header.e_flags & 0xFF) {
    case 0x4C: return "gfx942";
    case 0x4F: return "gfx950";
    default: return "another";
  }
}

}  // namespace

extern "C" {

#pragma GCC visibility push(default)

void standin_set_launcher(StandinLauncher launcher) { standin().launcher = launcher; }

void standin_set_device(int ordinal, const char* architecture, int compute_units) {
  std::vector<DeviceModel>& devices = standin().devices;
  if (static_cast<size_t>(ordinal) >= devices.size()) devices.resize(ordinal + 1);
  devices[ordinal] = {architecture, compute_units};
}

void standin_refuse(const char* entry, int status) {
  if (status == kSuccess) {
    standin().refused.erase(entry);
  } else {
    standin().refused[entry] = status;
  }
}

int64_t standin_calls(const char* entry) {
  std::lock_guard<std::mutex> lock(standin().mutex);
  return standin().calls[entry];
}

void standin_capture(bool on) {
  captures = on;
  capture_mode = on ? 1 : 0;
}

size_t standin_allocations(uint64_t* addresses, uint64_t* sizes, size_t capacity) {
  std::lock_guard<std::mutex> lock(standin().mutex);
  size_t i = 0;
  for (const auto& [address, size] : standin().allocations) {
    if (i < capacity) {
      addresses[i] = address;
      sizes[i] = size;
    }
    ++i;
  }
  return i;
}

int hipGetDevice(int* ordinal) {
  *ordinal = current_device;
  return enter("hipGetDevice");
}

int hipSetDevice(int ordinal) {
  if (const int status = enter("hipSetDevice")) return status;
  if (ordinal < 0 || static_cast<size_t>(ordinal) >= standin().devices.size()) return fail(kInvalidDevice);
  current_device = ordinal;
  return kSuccess;
}

// The layout of hipDeviceProp_tR0600 as far as the module reads it.
int hipGetDevicePropertiesR0600(char* properties, int ordinal) {
  if (const int status = enter("hipGetDevicePropertiesR0600")) return status;
  if (ordinal < 0 || static_cast<size_t>(ordinal) >= standin().devices.size()) return fail(kInvalidDevice);
  const DeviceModel& device = standin().devices[ordinal];
  std::memcpy(properties + 388, &device.compute_units, sizeof(int));
  std::strncpy(properties + 1160, device.architecture.c_str(), 255);
  return kSuccess;
}

int hipModuleLoadData(void** module, const void* image) {
  if (const int status = enter("hipModuleLoadData")) return status;
  if (captures && capture_mode != 2) return fail(kStreamCaptureUnsupported);
  Elf64_Ehdr header;
  std::memcpy(&header, image, sizeof(header));
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return fail(kInvalidValue);
  const std::string& device = standin().devices[current_device].architecture;
  if (device.substr(0, device.find(':')) != architecture_of(header)) return fail(kNoBinaryForGpu);
  const size_t bytes = header.e_shoff + size_t{header.e_shnum} * header.e_shentsize;  // the headers stand at the end
  const auto* begin = static_cast<const char*>(image);
  std::lock_guard<std::mutex> lock(standin().mutex);
  standin().codes.push_back(std::make_unique<Code>(Code{current_device, std::vector<char>(begin, begin + bytes)}));
  *module = standin().codes.back().get();
  return kSuccess;
}

int hipModuleGetFunction(void** function, void* module, const char* name) {
  if (const int status = enter("hipModuleGetFunction")) return status;
  const auto* code = static_cast<const Code*>(module);
  const std::string descriptor = std::string(1, '\0') + name + ".kd" + std::string(1, '\0');  // of the symbols' names
  if (memmem(code->image.data(), code->image.size(), descriptor.data(), descriptor.size()) == nullptr) {
    return fail(kNotFound);
  }
  std::lock_guard<std::mutex> lock(standin().mutex);
  standin().kernels.push_back(std::make_unique<KernelOfCode>(KernelOfCode{code, name}));
  *function = standin().kernels.back().get();
  return kSuccess;
}

int hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned lds_bytes, void*, void** parameters,
                          void** extra) {
  if (const int status = enter("hipModuleLaunchKernel")) return status;
  const auto* kernel = static_cast<const KernelOfCode*>(function);
  if (kernel->code->ordinal != current_device) return fail(kInvalidDevice);
  const bool packed = parameters == nullptr && extra[0] == reinterpret_cast<void*>(1) &&
                      extra[2] == reinterpret_cast<void*>(2) && extra[4] == reinterpret_cast<void*>(3);
  const uint64_t threads = uint64_t{block_x} * block_y * block_z;
  if (!packed || grid_x == 0 || grid_y == 0 || grid_z == 0 || threads == 0 || threads > 1024)
    return fail(kInvalidValue);
  if (standin().launcher == nullptr) return fail(kLaunchFailure);
  const uint32_t grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
  const std::vector<char>& image = kernel->code->image;
  return fail(standin().launcher(image.data(), image.size(), kernel->name.c_str(), grid, block, lds_bytes, extra[1],
                                 *static_cast<size_t*>(extra[3])));
}

int hipMemcpyAsync(void* target, const void* source, size_t bytes, int, void*) {
  if (const int status = enter("hipMemcpyAsync")) return status;
  std::memcpy(target, source, bytes);
  return kSuccess;
}

int hipMemsetAsync(void* target, int value, size_t bytes, void*) {
  if (const int status = enter("hipMemsetAsync")) return status;
  std::memset(target, value, bytes);
  return kSuccess;
}

// Memory that the host may use too, as the real function's.
int hipMallocManaged(void** memory, size_t bytes, unsigned) {
  if (const int status = enter("hipMallocManaged")) return status;
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
  if (*memory == nullptr) return fail(kOutOfMemory);
  std::memset(*memory, 0xFF, bytes);
  std::lock_guard<std::mutex> lock(standin().mutex);
  standin().allocations[reinterpret_cast<uint64_t>(*memory)] = bytes;
  return kSuccess;
}

int hipFree(void* memory) {
  if (const int status = enter("hipFree")) return status;
  std::lock_guard<std::mutex> lock(standin().mutex);
  standin().allocations.erase(reinterpret_cast<uint64_t>(memory));
  std::free(memory);
  return kSuccess;
}

int hipDeviceSynchronize() { return enter("hipDeviceSynchronize"); }

int hipThreadExchangeStreamCaptureMode(int* mode) {
  if (const int status = enter("hipThreadExchangeStreamCaptureMode")) return status;
  std::swap(capture_mode, *mode);
  return kSuccess;
}

const char* hipGetErrorName(int status) {
  switch (status) {
    case kInvalidValue: return "hipErrorInvalidValue";
    case kOutOfMemory: return "hipErrorOutOfMemory";
    case kInvalidDevice: return "hipErrorInvalidDevice";
    case kNoBinaryForGpu: return "hipErrorNoBinaryForGpu";
    case kNotFound: return "hipErrorNotFound";
    case kLaunchFailure: return "hipErrorLaunchFailure";
    case kStreamCaptureUnsupported: return "hipErrorStreamCaptureUnsupported";
    default: return "hipErrorUnknown";
  }
}

const char* hipGetErrorString(int status) { return status == kSuccess ? "no error" : "as the stand-in was told"; }

int hipGetLastError() {
  const int status = last_error;
  last_error = kSuccess;
  return status;
}

#pragma GCC visibility pop
}
