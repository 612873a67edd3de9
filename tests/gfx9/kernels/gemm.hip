// C [64][64] = A [64][K] * B [64][K]^T in bf16. Four waves of one 32x32 tile each; 32 values of k at a time in LDS.
// B's rows come page by page: a page has 16 rows, and `pages` says where each lies.
#include "device.h"

constexpr int kPitch = 40;  // of a row of 32 values in LDS

extern "C" GLOBAL void THREADS(256) gemm(const u16* a, const u16* b, const int* pages, float* c, int depth) {
  SHARED u16 tile_a[64 * kPitch], tile_b[64 * kPitch];
  const int lane = thread() % 64, wave = thread() / 64;
  const int rows = wave / 2 * 32, columns = wave % 2 * 32;
  f32x16 sum = {};
  for (int k = 0; k < depth; k += 32) {
    const int row = thread() / 4, column = thread() % 4 * 8;
#ifdef BUG_PAGE
    const int page = pages[row / 16 + 1];
#else
    const int page = pages[row / 16];
#endif
    *(s16x8*)&tile_a[row * kPitch + column] = *(const s16x8*)&a[row * depth + k + column];
    *(s16x8*)&tile_b[row * kPitch + column] = *(const s16x8*)&b[(page * 16 + row % 16) * depth + k + column];
    barrier();
    const u16* from_a = &tile_a[(rows + lane % 32) * kPitch];
    const u16* from_b = &tile_b[(columns + lane % 32) * kPitch];
#ifdef BUG_OPERAND
    from_b = &tile_b[(columns + lane % 16) * kPitch];
#endif
#ifdef __gfx950__
    for (int inner = 0; inner < 32; inner += 16) {
      const bf16x8 x = *(const bf16x8*)&from_a[inner + lane / 32 * 8],
                   y = *(const bf16x8*)&from_b[inner + lane / 32 * 8];
      sum = __builtin_amdgcn_mfma_f32_32x32x16_bf16(x, y, sum, 0, 0, 0);
    }
#else
    for (int inner = 0; inner < 32; inner += 8) {
      const s16x4 x = *(const s16x4*)&from_a[inner + lane / 32 * 4], y = *(const s16x4*)&from_b[inner + lane / 32 * 4];
      sum = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(x, y, sum, 0, 0, 0);
    }
#endif
    barrier();
  }
  for (int r = 0; r < 16; ++r) c[(rows + 8 * (r / 4) + 4 * (lane / 32) + r % 4) * 64 + columns + lane % 32] = sum[r];
}
