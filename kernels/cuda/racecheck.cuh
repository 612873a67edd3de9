// What a build for compute-sanitizer's racecheck (MLA_RACECHECK) does besides, so that the tool sees what orders two
// accesses. It follows barriers of the whole CTA and, at mbarriers, what a thread did before its own arrival; neither
// __syncwarp in front of another lane's arrival, nor named barriers among some of the warps. So all lanes of a warp
// arrive, and each named barrier has a twin, an mbarrier at which the same threads arrive and wait.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mla::ptx {

#if defined(MLA_RACECHECK)
constexpr uint32_t kWarpArrivals = 32;  // how often a warp arrives at an mbarrier
constexpr int kNamedBarriers = 16;
constexpr size_t kTwinBytes = (kNamedBarriers + 1) * sizeof(uint64_t);  // one more, to begin at a multiple
#else
constexpr uint32_t kWarpArrivals = 1;  // __syncwarp orders what its other lanes did before
constexpr size_t kTwinBytes = 0;       // behind the shared memory that a kernel asks for
#endif

#if defined(MLA_RACECHECK) && defined(__CUDACC__)

// A phase of a twin, whatever the number of threads: each arrives kTwinArrivals / threads times.
constexpr uint32_t kTwinArrivals = 7680;

__device__ __forceinline__ uint32_t twin_of(int32_t name) {
  extern __shared__ __align__(1024) unsigned char shared_base[];
  uint32_t bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;\n" : "=r"(bytes));
  const uint32_t end = static_cast<uint32_t>(__cvta_generic_to_shared(shared_base)) + bytes;
  return (end & ~7u) - (kNamedBarriers - name) * 8;
}

__device__ __forceinline__ uint64_t twin_arrive(int32_t name, int32_t threads) {
  uint64_t phase;
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], %2;\n"
               : "=l"(phase)
               : "r"(twin_of(name)), "r"(kTwinArrivals / threads)
               : "memory");
  return phase;
}

__device__ __forceinline__ void twin_sync(int32_t name, int32_t threads) {
  const uint64_t phase = twin_arrive(name, threads);
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(twin_of(name)), "l"(phase)
        : "memory");
  } while (!done);
}

// By all threads of the CTA, before the first named barrier.
__device__ __forceinline__ void init_twins() {
  if (threadIdx.x < kNamedBarriers) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(twin_of(threadIdx.x)), "r"(kTwinArrivals)
                 : "memory");
  }
  __syncthreads();
}

#elif defined(__CUDACC__)

__device__ __forceinline__ void twin_arrive(int32_t /*name*/, int32_t /*threads*/) {}
__device__ __forceinline__ void twin_sync(int32_t /*name*/, int32_t /*threads*/) {}
__device__ __forceinline__ void init_twins() {}

#endif

}  // namespace mla::ptx
