// Functions that the host and devices share.
#pragma once

#include <cstddef>
#include <cstring>

#if defined(__CUDACC__)
#define MLA_HOST_DEVICE __host__ __device__
#define MLA_FORCE_INLINE __forceinline__
#elif defined(__HIP__)
#define MLA_HOST_DEVICE __attribute__((host)) __attribute__((device))
#define MLA_FORCE_INLINE inline __attribute__((always_inline))
#else
#define MLA_HOST_DEVICE
#define MLA_FORCE_INLINE inline
#endif

#if defined(__HIP__)
// Such functions copy bits with memcpy, which without HIP's own headers is the host's alone.
static __attribute__((device)) inline void* memcpy(void* target, const void* source, size_t bytes) {
  return __builtin_memcpy(target, source, bytes);
}
#endif
