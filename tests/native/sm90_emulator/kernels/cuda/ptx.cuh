// The emulator's side of kernels/cuda/ptx.cuh: what the emulated kernels take from there.
#pragma once

#include "tests/native/sm90_emulator/machine.h"

namespace mla::ptx {

inline uint32_t shared_address(const void* pointer) {
  const auto offset = static_cast<const unsigned char*>(pointer) - MLA_EMULATED::shared_base;
  emulator::require(offset >= 0 && offset < emulator::kSharedBytes, "a pointer outside shared memory");
  return emulator::kSharedStart + static_cast<uint32_t>(offset);
}

inline float exp2_approximate(float x) { return std::exp2(x); }

inline int thread_index() { return emulator::machine.current; }

inline void launch_dependents() {}

inline void wait_for_previous_kernel() {}

inline void store_words(void* target, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t words[] = {a, b, c, d};
  emulator::require(reinterpret_cast<uintptr_t>(target) % sizeof(words) == 0, "stores are aligned to their size");
  std::memcpy(target, words, sizeof(words));
}

// Every lane reads for itself: the addresses of its matrices' rows are what it needs of the others.
template <int kMatrices>
void load_matrices(uint32_t (&r)[kMatrices], uint32_t shared, bool transposed) {
  auto& machine = emulator::machine;
  emulator::require(shared % 16 == 0, "a row of ldmatrix is aligned to 16 bytes");
  machine.warp().values[0][machine.lane()] = shared;
  machine.meet([](auto&) {});
  const int g = machine.lane() / 4, t = machine.lane() % 4;
  for (int matrix = 0; matrix < kMatrices; ++matrix) {
    uint16_t pair[2];
    for (int e = 0; e < 2; ++e) {
      const int row = transposed ? 2 * t + e : g, column = transposed ? g : 2 * t + e;
      std::memcpy(&pair[e], machine.shared(machine.warp().values[0][matrix * 8 + row]) + 2 * column, sizeof(pair[e]));
    }
    r[matrix] = static_cast<uint32_t>(pair[1]) << 16 | pair[0];
  }
  machine.meet([](auto&) {});
}

inline const unsigned char* opaque(const unsigned char* address) { return address; }

// At once, or as late as its thread waits for it.
inline void cp_async_16(uint32_t shared, const void* global, bool valid) {
  auto& machine = emulator::machine;
  emulator::require(shared % 16 == 0, "cp.async writes 16 aligned bytes");
  const auto copy = [shared, global, valid] {
    unsigned char* target = emulator::machine.shared(shared);
    valid ? std::memcpy(target, global, 16) : std::memset(target, 0, 16);
  };
  if (machine.random() % 2 == 0) return copy();
  machine.thread().copying.push_back(copy);
}

inline void cp_async_commit() {
  emulator::Thread& thread = emulator::machine.thread();
  thread.copies.push_back(std::move(thread.copying));
  thread.copying.clear();
}

template <int kPending>
void cp_async_wait() {
  auto& groups = emulator::machine.thread().copies;
  for (; groups.size() > kPending; groups.pop_front()) {
    for (const emulator::AsyncCopy& copy : groups.front()) copy();
  }
}

template <class Element>
float half_of(uint32_t pair, int which) {
  const auto bits = static_cast<uint16_t>(which == 0 ? pair : pair >> 16);
  Element value;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof(value));
  return to_float(value);
}

template <class Element>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  auto& machine = emulator::machine;
  auto& values = machine.warp().values;
  for (int i = 0; i < 4; ++i) values[i][machine.lane()] = a[i];
  values[4][machine.lane()] = b0;
  values[5][machine.lane()] = b1;
  machine.meet([](auto&) {});
  const int g = machine.lane() / 4, t = machine.lane() % 4;
  for (int i = 0; i < 4; ++i) {
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      const uint32_t left = values[k / 8 * 2 + i / 2][g * 4 + k % 8 / 2];
      const uint32_t right = values[4 + k / 8][(2 * t + i % 2) * 4 + k % 8 / 2];
      sum += half_of<Element>(left, k % 2) * half_of<Element>(right, k % 2);
    }
    d[i] += sum;
  }
  machine.meet([](auto&) {});
}

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) { load_matrices(r, shared, false); }

inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t shared) { load_matrices(r, shared, true); }

inline void ldmatrix_x2(uint32_t (&r)[2], uint32_t shared) { load_matrices(r, shared, false); }

inline void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t shared) { load_matrices(r, shared, true); }

}  // namespace mla::ptx
