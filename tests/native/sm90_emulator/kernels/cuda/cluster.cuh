// The emulator's side of kernels/cuda/cluster.cuh.
#pragma once

#include "tests/native/sm90_emulator/kernels/cuda/hopper.cuh"

namespace mla::ptx {

inline void cluster_sync() {
  machine.meet([](auto&) {});
  machine.cluster_barrier();
}

inline uint32_t remote_address(uint32_t shared, uint32_t rank) {
  return emulator::Machine::remote_address(shared, rank);
}

inline void mbarrier_arrive_remote(uint32_t remote) { machine.arrive_remote(remote); }

inline void copy_to_remote(uint32_t remote, uint32_t shared, uint32_t bytes, uint32_t remote_barrier) {
  machine.copy_to_remote(remote, shared, bytes, remote_barrier);
}

}  // namespace mla::ptx
