// Hopper's asynchronous instructions, one wrapper each (sm_90): barriers in shared memory, the tensor copy engine, the
// orderings between it, the tensor cores and ordinary accesses. wgmma.cuh has the matrix products.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/racecheck.cuh"

namespace mla::ptx {

// --- mbarriers. A phase ends when `count` arrivals and all announced bytes are in; waiting for parity 0 is waiting for
// the end of the first phase, and for parity 1, on a new barrier, returns at once.

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}

// Shows the barriers that this thread initialised to the copy engine too.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// By a whole warp in step, kWarpArrivals times.
__device__ __forceinline__ void mbarrier_arrive_in_step(uint32_t barrier) {
  if (kWarpArrivals > 1 || threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

__device__ __forceinline__ void mbarrier_arrive_warp(uint32_t barrier) {
  __syncwarp();
  mbarrier_arrive_in_step(barrier);
}

// One arrival, and `bytes` that copies will deliver before the phase ends.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

// Arrives, as one of the arrivals that the barrier counts, when all of this thread's cp.async so far have written.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}

// --- Named barriers, among the `threads` of some warps. 0 is __syncthreads'.

__device__ __forceinline__ void barrier_sync(int32_t name, int32_t threads) {
  asm volatile("barrier.cta.sync %0, %1;\n" ::"r"(name), "r"(threads) : "memory");
  twin_sync(name, threads);
}

__device__ __forceinline__ void barrier_arrive(int32_t name, int32_t threads) {
  asm volatile("barrier.cta.arrive %0, %1;\n" ::"r"(name), "r"(threads) : "memory");
  twin_arrive(name, threads);
}

// As barrier_sync; true where any of the threads brought true.
__device__ __forceinline__ bool barrier_any(int32_t name, int32_t threads, bool value) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "barrier.cta.red.or.pred q, %2, %3, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}\n"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(value)), "r"(name), "r"(threads)
      : "memory");
  twin_sync(name, threads);
  return any != 0;
}

// --- Registers of this thread's warpgroup, all of whose warps execute this: a multiple of 8, and together no more than
// the CTA was launched with.

template <int kNow, int kRegisters>
__device__ __forceinline__ void change_registers() {
  if constexpr (kRegisters < kNow) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
  if constexpr (kRegisters > kNow) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// Brings the line of `address`, and the translation of its page, near before they are needed.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(address) : "memory");
}

// --- The tensor copy engine (TMA). Coordinates outside the tensor read as zeros and count as delivered.

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// Cache policies of L2: for what is read once, and for what others read too.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t evict_normal_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, uint64_t policy,
                                         int32_t x, int32_t y, int32_t z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%4, %5, %6}], [%2], %3;\n" ::"r"(shared),
      "l"(map), "r"(barrier), "l"(policy), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, uint64_t policy,
                                         int32_t x, int32_t y, int32_t z, int32_t u) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%4, %5, %6, %7}], [%2], %3;\n" ::"r"(shared),
      "l"(map), "r"(barrier), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(u)
      : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, uint64_t policy,
                                         int32_t x, int32_t y, int32_t z, int32_t u, int32_t v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;\n" ::"r"(shared),
      "l"(map), "r"(barrier), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
      : "memory");
}

// Bytes as they lie: a multiple of 16, from and to multiples of 16.
__device__ __forceinline__ void copy_bytes(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier,
                                           uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;\n" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// This thread's ordinary writes to shared memory, before later reads by wgmma and the copy engine.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

__device__ __forceinline__ uint4 load_shared_16(uint32_t shared) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(shared)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_shared_16(uint32_t shared, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(shared), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t shared) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(value) : "r"(shared) : "memory");
  return value;
}

__device__ __forceinline__ void store_shared_4(uint32_t shared, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(shared), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_half(uint32_t shared, __half value) {
  asm volatile("st.shared.b16 [%0], %1;\n" ::"r"(shared), "h"(__half_as_ushort(value)) : "memory");
}

// --- Shared memory by matrices: lanes 8i .. 8i+7 give the addresses of the rows of matrix i; transposed, lane
// 4 * g + t holds rows 2t, 2t+1 of column g.
__device__ __forceinline__ void stmatrix_x2_trans(uint32_t shared, uint32_t first, uint32_t second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 [%0], {%1, %2};\n" ::"r"(shared), "r"(first),
               "r"(second)
               : "memory");
}

// Not transposed: lane 4 * g + t holds row g, columns 2t, 2t+1.
__device__ __forceinline__ void stmatrix_x4(uint32_t shared, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(shared),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

}  // namespace mla::ptx
