// The emulator's side of kernels/cuda/hopper.cuh.
#pragma once

#include "tests/native/sm90_emulator/machine.h"

namespace mla::ptx {

using emulator::machine;

inline void mbarrier_init(uint32_t barrier, uint32_t count) {
  machine.barrier(barrier) = {static_cast<uint16_t>(count), static_cast<uint16_t>(count), 0, 0};
}

inline void fence_mbarrier_init() {}

inline void mbarrier_arrive(uint32_t barrier) { machine.arrive(barrier); }

#if defined(MLA_RACECHECK)
constexpr uint32_t kWarpArrivals = 32;
#else
constexpr uint32_t kWarpArrivals = 1;
#endif

inline void mbarrier_arrive_in_step(uint32_t barrier) {
  if (kWarpArrivals > 1 || machine.lane() == 0) machine.arrive(barrier);
}

inline void mbarrier_arrive_warp(uint32_t barrier) {
  machine.meet([](auto&) {});
  mbarrier_arrive_in_step(barrier);
}

inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  machine.barrier(barrier).bytes += static_cast<int32_t>(bytes);
  machine.arrive(barrier);
}

inline void cp_async_arrive(uint32_t barrier) { machine.arrive_behind_copies(barrier); }

inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  machine.maybe_yield();
  machine.wait_until([&] { return machine.barrier(barrier).phase % 2 != parity; });
}

inline void barrier_sync(int32_t name, int32_t threads) { machine.named_barrier(name, threads, true); }

inline void barrier_arrive(int32_t name, int32_t threads) { machine.named_barrier(name, threads, false); }

inline bool barrier_any(int32_t name, int32_t threads, bool value) {
  return machine.named_barrier(name, threads, true, value);
}

inline void init_twins() {}

template <int kNow, int kRegisters>
void change_registers() {}

inline void prefetch_line(const void*) {}

inline void prefetch_tensor_map(const CUtensorMap*) {}

inline uint64_t evict_first_policy() { return 0; }

inline uint64_t evict_normal_policy() { return 0; }

inline void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, uint64_t, int32_t x, int32_t y,
                     int32_t z) {
  machine.copy(shared, map, barrier, 3, {x, y, z, 0, 0});
}

inline void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, uint64_t, int32_t x, int32_t y,
                     int32_t z, int32_t u) {
  machine.copy(shared, map, barrier, 4, {x, y, z, u, 0});
}

inline void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, uint64_t, int32_t x, int32_t y,
                     int32_t z, int32_t u, int32_t v) {
  machine.copy(shared, map, barrier, 5, {x, y, z, u, v});
}

inline void copy_bytes(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier, uint64_t) {
  machine.copy(shared, global, bytes, barrier);
}

inline void fence_async_proxy() {}

template <class T>
T load_shared(uint32_t shared) {
  emulator::require(shared % sizeof(T) == 0, "an access is aligned to its size");
  T value;
  std::memcpy(static_cast<void*>(&value), machine.shared(shared), sizeof(T));
  return value;
}

template <class T>
void store_shared(uint32_t shared, const T& value) {
  emulator::require(shared % sizeof(T) == 0, "an access is aligned to its size");
  std::memcpy(machine.shared(shared), static_cast<const void*>(&value), sizeof(T));
}

inline uint4 load_shared_16(uint32_t shared) { return load_shared<uint4>(shared); }
inline void store_shared_16(uint32_t shared, uint4 value) { store_shared(shared, value); }
inline uint32_t load_shared_4(uint32_t shared) { return load_shared<uint32_t>(shared); }
inline void store_shared_4(uint32_t shared, uint32_t value) { store_shared(shared, value); }
inline void store_shared_half(uint32_t shared, __half value) { store_shared(shared, value); }

inline void stmatrix_x2_trans(uint32_t shared, uint32_t first, uint32_t second) {
  auto& values = machine.warp().values;
  values[0][machine.lane()] = shared;
  values[1][machine.lane()] = first;
  values[2][machine.lane()] = second;
  machine.meet([](emulator::Warp& warp) {
    for (int matrix = 0; matrix < 2; ++matrix) {
      for (int row = 0; row < 8; ++row) {
        const uint32_t address = warp.values[0][matrix * 8 + row];
        emulator::require(address % 16 == 0, "a row of stmatrix is aligned to 16 bytes");
        uint16_t line[8];
        for (int column = 0; column < 8; ++column) {  // transposed: element (column, row) of the fragment
          const uint32_t pair = warp.values[1 + matrix][4 * column + row / 2];
          line[column] = static_cast<uint16_t>(row % 2 != 0 ? pair >> 16 : pair);
        }
        std::memcpy(machine.shared(address), line, sizeof(line));
      }
    }
  });
}

inline void stmatrix_x4(uint32_t shared, const uint32_t (&matrices)[4]) {
  emulator::require(shared % 16 == 0, "a row of stmatrix is aligned to 16 bytes");
  machine.warp().values[0][machine.lane()] = shared;
  machine.meet([](auto&) {});
  for (int matrix = 0; matrix < 4; ++matrix) {
    const uint32_t row = machine.warp().values[0][matrix * 8 + machine.lane() / 4];
    std::memcpy(machine.shared(row + machine.lane() % 4 * 4), &matrices[matrix], 4);
  }
  machine.meet([](auto&) {});
}

}  // namespace mla::ptx
