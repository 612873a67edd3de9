// LDS by address: what the language has no expression for.
#pragma once

#include "kernels/rocm/device.h"

namespace mla {

#define MLA_LDS __attribute__((address_space(3)))

using LdsBytes = MLA_LDS unsigned char*;

// Of what lies in LDS and is pointed to as if it might lie anywhere.
__device__ __forceinline__ LdsBytes lds_address(const void* place) { return (LdsBytes) const_cast<void*>(place); }

#if defined(__gfx950__)
// Four elements of 16 bits that lie in the LDS of other lanes: lane i of 16 gets, as its q-th, element i % 4 of the
// eight bytes at the address that lane 4 * q + i / 4 of the 16 gave.
__device__ __forceinline__ U32x2 lds_read_transposed(LdsBytes address) {
  using Bits = short __attribute__((ext_vector_type(4)));
  return bits_as<U32x2>(__builtin_amdgcn_ds_read_tr16_b64_v4i16(reinterpret_cast<MLA_LDS Bits*>(address)));
}

// Memory to LDS, past the registers: lane l's 16 bytes from source + offset (of each lane) to target + 16 * l; `source`
// and `target` are the wave's. In assembly, since the compiler would wait for all of these copies in front of any read
// of LDS that may be of what they write. It does not know of them: count them, and wait with wait_for_loads.
__device__ __forceinline__ void copy_to_lds(const unsigned char* source, uint32_t offset, LdsBytes target) {
  const uint32_t place = static_cast<uint32_t>(uniform(static_cast<int32_t>(reinterpret_cast<uintptr_t>(target))));
  asm volatile(
      "s_mov_b32 m0, %0\n\t"
      "s_nop 0\n\t"
      "global_load_lds_dwordx4 %1, %2" ::"s"(place),
      "v"(offset), "s"(source)
      : "memory");
}

// An address in LDS as a sum of two of the wave's numbers, which goes into m0 in one instruction.
struct LdsPlace {
  uint32_t base, offset;
};

// As above.
__device__ __forceinline__ void copy_to_lds(const unsigned char* source, uint32_t offset, LdsPlace target) {
  asm volatile(
      "s_add_u32 m0, %0, %1\n\t"
      "s_nop 0\n\t"
      "global_load_lds_dwordx4 %2, %3" ::"s"(target.base),
      "s"(target.offset), "v"(offset), "s"(source)
      : "memory", "scc");
}

// With an address in each lane.
__device__ __forceinline__ void copy_to_lds(const unsigned char* source, LdsPlace target) {
  asm volatile(
      "s_add_u32 m0, %0, %1\n\t"
      "s_nop 0\n\t"
      "global_load_lds_dwordx4 %2, off" ::"s"(target.base),
      "s"(target.offset), "v"(source)
      : "memory", "scc");
}

// Four copies: the i-th from sources[i] + offsets[i] + i * kStride to target + i * kStride. The instruction's own
// offset counts on both sides, so that m0 is set once.
template <int kStride>
__device__ __forceinline__ void copy_four_to_lds(const unsigned char* const (&sources)[4], const uint32_t (&offsets)[4],
                                                 LdsPlace target) {
  static_assert(kStride > 0 && 3 * kStride < 4096, "an offset has 13 bits, one of them its sign");
  asm volatile(
      "s_add_u32 m0, %0, %1\n\t"
      "s_nop 0\n\t"
      "global_load_lds_dwordx4 %2, %3\n\t"
      "global_load_lds_dwordx4 %4, %5 offset:%10\n\t"
      "global_load_lds_dwordx4 %6, %7 offset:%11\n\t"
      "global_load_lds_dwordx4 %8, %9 offset:%12" ::"s"(target.base),
      "s"(target.offset), "v"(offsets[0]), "s"(sources[0]), "v"(offsets[1]), "s"(sources[1]), "v"(offsets[2]),
      "s"(sources[2]), "v"(offsets[3]), "s"(sources[3]), "n"(kStride), "n"(2 * kStride), "n"(3 * kStride)
      : "memory", "scc");
}
#endif

// Until at most kLeft of the wave's loads from memory, copies into LDS among them, are on their way. They end in order.
template <int kLeft>
__device__ __forceinline__ void wait_for_loads() {
  static_assert(kLeft < 64);
  asm volatile("s_waitcnt vmcnt(%0)" ::"n"(kLeft) : "memory");
}

// Until all of the wave's accesses to LDS have ended, and nothing is moved across. Once for a group of reads, instead
// of by the compiler once for each.
__device__ __forceinline__ void wait_for_lds() {
  constexpr int kOnlyLds = 0xC07F;  // fields of 4 and more bits for other counters, full; lgkmcnt 0
  __builtin_amdgcn_sched_barrier(0);
  __builtin_amdgcn_s_waitcnt(kOnlyLds);
  __builtin_amdgcn_sched_barrier(0);
}

}  // namespace mla
