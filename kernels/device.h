// What a kernel's entry function runs on: a stream on a GPU, a parallel loop on the CPU.
#pragma once

#include <cstdint>
#include <functional>

namespace mla {

#if defined(JAX_MLA_CUDA) || defined(JAX_MLA_ROCM)

struct Device {
  void* stream;     // cudaStream_t or hipStream_t
  int32_t ordinal;  // device number
};

#else

// Runs f(0) ... f(n - 1), in any order and on any thread, and returns when all are done. f must not throw.
using ParallelFor = std::function<void(int64_t n, const std::function<void(int64_t)>& f)>;

struct Device {
  ParallelFor parallel_for;
  int32_t threads;  // how many of them may run at once
};

#endif

}  // namespace mla
