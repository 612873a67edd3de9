// Memory that kernels under test read and write: the host's for the CPU's kernels, the HIP runtime's for AMD's, as
// allocations of exactly their size, so that a sanitizer or the emulator sees the first byte past one.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <vector>

#if defined(JAX_MLA_ROCM)
#include "tests/native/rocm_memory.h"
#endif

namespace mla::test {

#if defined(JAX_MLA_ROCM)
template <class T>
using Buffer = std::vector<T, ManagedAllocator<T>>;
#else
template <class T>
using Buffer = std::vector<T>;
#endif

// One number in such memory.
template <class T>
class Scalar {
 public:
  explicit Scalar(T value) : memory_(1, value) {}
  Scalar& operator=(T value) {
    memory_[0] = value;
    return *this;
  }
  operator T() const { return memory_[0]; }
  T* data() { return memory_.data(); }

 private:
  Buffer<T> memory_;
};

}  // namespace mla::test
