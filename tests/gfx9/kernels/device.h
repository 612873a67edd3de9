// What the sample kernels need of HIP, and bugs that a test plants by -D: see test_gfx9_kernels.py.
#pragma once

#define GLOBAL __attribute__((global))
#define DEVICE __attribute__((device)) inline __attribute__((always_inline))
#define SHARED __attribute__((shared))
#define THREADS(n) __attribute__((amdgpu_flat_work_group_size(n, n)))

typedef unsigned short u16;
typedef unsigned int u32;
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef short s16x4 __attribute__((ext_vector_type(4)));
typedef short s16x8 __attribute__((ext_vector_type(8)));
typedef __bf16 bf16x8 __attribute__((ext_vector_type(8)));

DEVICE int thread() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE int workgroup() { return __builtin_amdgcn_workgroup_id_x(); }

DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
#ifndef BUG_MISSING_BARRIER
  __builtin_amdgcn_s_barrier();
#endif
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
