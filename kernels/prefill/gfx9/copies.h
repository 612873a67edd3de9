// gfx950: from memory to LDS without registers.
#pragma once

#include "kernels/prefill/gfx9/tile.h"

namespace mla::gfx9_prefill {

// Starts to bring 16 bytes a lane to `target` + 16 * lane; the copy counts as a load of the wave's. Written as
// assembly, since the compiler would have every read of LDS wait for all copies.
__device__ __forceinline__ void start_copy(LdsBytes target, const unsigned char* source, uint32_t offset) {
  const uint32_t address = uniform(static_cast<int32_t>(reinterpret_cast<uintptr_t>(target)));
  asm volatile("s_mov_b32 m0, %0\n\ts_nop 0\n\tglobal_load_lds_dwordx4 %1, %2" ::"s"(address), "v"(offset), "s"(source)
               : "memory");
}
// The wave's loads, and copies, have arrived.
__device__ __forceinline__ void wait_for_copies() { asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); }

}  // namespace mla::gfx9_prefill
