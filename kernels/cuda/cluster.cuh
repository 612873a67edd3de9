// CTAs of a cluster that share what they read (sm_90): each other's barriers, and copies to each other's shared memory.
// A remote address is one of shared::cluster; a local one means the own CTA there too.
#pragma once

#include <cstdint>

namespace mla::ptx {

// All threads of all CTAs of the cluster, a warp at a time: what they wrote to shared memory before is seen behind.
__device__ __forceinline__ void cluster_sync() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// Where the CTA `rank` of the cluster has what the local address is here.
__device__ __forceinline__ uint32_t remote_address(uint32_t shared, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(remote) : "r"(shared), "r"(rank));
  return remote;
}

// Orders nothing but what the tensor cores have read before: fences for the cluster's ordinary accesses take longer
// than a block of products.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t remote) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(remote) : "memory");
}

// Bytes of this CTA's shared memory to another's, a multiple of 16; they count at a barrier there. What ordinary writes
// have put there needs fence_async_proxy first.
__device__ __forceinline__ void copy_to_remote(uint32_t remote, uint32_t shared, uint32_t bytes,
                                               uint32_t remote_barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(remote),
      "r"(shared), "r"(bytes), "r"(remote_barrier)
      : "memory");
}

}  // namespace mla::ptx
