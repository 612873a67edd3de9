// The machine code that the build put into the module: one code object for each .hip source and architecture.
#pragma once

#include <cstddef>

namespace mla {

struct CodeObject {
  const char* name;          // of the source below kernels/, without .hip: "decode/gfx9/plan"
  const char* architecture;  // "gfx942" or "gfx950"
  const void* image;
  size_t bytes;
};

// Defined by a source that the build writes.
extern const CodeObject kCodeObjects[];
extern const size_t kCodeObjectCount;

}  // namespace mla
