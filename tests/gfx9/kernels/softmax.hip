// Each row of 256 values, one wave a row; totals [1] gets the sum of all exponentials, by an atomic operation.
#include "device.h"

DEVICE float other_lane(float value, int distance) {
  const int address = (thread() % 64 ^ distance) * 4;
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute(address, __builtin_bit_cast(int, value)));
}

template <int kControl>
DEVICE float dpp(float value) {
  return __builtin_bit_cast(float,
                            __builtin_amdgcn_update_dpp(0, __builtin_bit_cast(int, value), kControl, 15, 15, true));
}

// Over rows of 16 lanes by DPP (quad_perm twice, row_half_mirror, row_mirror), over rows by ds_bpermute.
DEVICE float highest(float value) {
  value = __builtin_fmaxf(value, dpp<0xb1>(value));
  value = __builtin_fmaxf(value, dpp<0x4e>(value));
  value = __builtin_fmaxf(value, dpp<0x141>(value));
  value = __builtin_fmaxf(value, dpp<0x140>(value));
  for (int distance = 16; distance < 64; distance *= 2) value = __builtin_fmaxf(value, other_lane(value, distance));
  return value;
}

DEVICE float total(float value) {
  for (int distance = 32; distance > 0; distance /= 2) value += other_lane(value, distance);
  return value;
}

extern "C" GLOBAL void THREADS(256) softmax(const float* in, float* out, float* totals) {
  const int lane = thread() % 64, row = workgroup() * 4 + thread() / 64;
  f32x4 x = *(const f32x4*)&in[row * 256 + lane * 4];
  float a = x[0], b = x[1], c = x[2], d = x[3];
  const float top = highest(__builtin_fmaxf(__builtin_fmaxf(a, b), __builtin_fmaxf(c, d)));
  float sum = 0;
  for (int i = 0; i < 4; ++i) {
    x[i] = __builtin_amdgcn_exp2f((x[i] - top) * 1.44269504f);
    sum += x[i];
  }
  sum = total(sum);
  for (int i = 0; i < 4; ++i) x[i] = x[i] / sum;
  *(f32x4*)&out[row * 256 + lane * 4] = x;
  if (lane == 0) __hip_atomic_fetch_add(totals, sum, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
