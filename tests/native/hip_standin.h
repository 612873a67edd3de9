// What tests ask of the HIP runtime's stand-in (hip_standin.cc) beside HIP's own functions.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// Runs a kernel: the code object, the kernel's name, three numbers each of blocks and of threads, bytes of dynamic LDS,
// the kernel's parameters. Returns a hipError_t.
using StandinLauncher = int (*)(const void* image, size_t image_bytes, const char* symbol, const uint32_t* grid,
                                const uint32_t* block, uint32_t lds_bytes, const void* arguments,
                                size_t argument_bytes);
void standin_set_launcher(StandinLauncher launcher);

// Device `ordinal` is one of `architecture`, as gcnArchName has it ("gfx942:sramecc+:xnack-"). Devices are counted from
// 0 to the last that was set; before the first call there is one gfx942.
void standin_set_device(int ordinal, const char* architecture, int compute_units);

// Calls of `entry` ("hipModuleLoadData") return this hipError_t until it is set to 0.
void standin_refuse(const char* entry, int status);

// How often `entry` was called.
int64_t standin_calls(const char* entry);

// Whether the calling thread captures a stream, in thread-local mode: code is not loaded then, unless it has exchanged
// its mode for the relaxed one.
void standin_capture(bool captures);

// Addresses and sizes of what hipMalloc gave, up to `capacity` of them; the number of all.
size_t standin_allocations(uint64_t* addresses, uint64_t* sizes, size_t capacity);
}
