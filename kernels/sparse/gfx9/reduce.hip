// The reduction of mla_sparse_decode on AMD: a wave merges the pieces of one (token, head) row, eight columns a lane,
// in their order.
#include "kernels/decode/softmax.h"
#include "kernels/rocm/group.h"

namespace mla {
namespace {

constexpr int kThreads = 256;

template <class Element>
__device__ __forceinline__ void merge_row(const SparseDecodeParams& p) {
  const int64_t rows = int64_t{p.tokens} * p.heads;
  const int64_t row = int64_t{blockIdx.x} * (kThreads / kWave) + wave_id();
  if (row >= rows) return;
  const int column = lane_id() * kGroup;
  float highest = -INFINITY;  // of those that are numbers
  for (int32_t i = 0; i < p.splits; ++i) highest = __builtin_fmaxf(highest, p.partial_lse[i * rows + row]);
  float total = 0, sum[kGroup] = {};
#pragma unroll 4
  for (int32_t i = 0; i < p.splits; ++i) {
    const int64_t partial = i * rows + row;
    const float lse = p.partial_lse[partial];
    const auto values = load_group<float, /*kOnce=*/true>(p.partial_out + partial * kLatent + column);
    if (lse == -INFINITY) continue;  // saw no token; a NaN shows
    const float weight = exp2_approximate((lse - highest) * kLog2E);
    total += weight;
#pragma unroll
    for (int c = 0; c < kGroup; ++c) sum[c] += weight * element_at(values, c);
  }
  const bool empty = total == 0;
  if (lane_id() == 0) p.lse[row] = empty ? -INFINITY : highest + log2_approximate(total) * kLn2;
  if (!empty && p.sink != nullptr) total += exp2_approximate((p.sink[row % p.heads] - highest) * kLog2E);
  const float factor = empty ? 0 : 1 / total;
#pragma unroll
  for (int c = 0; c < kGroup; ++c) sum[c] *= factor;
  store_group<Element>(static_cast<Element*>(p.out) + row * kLatent + column, from_floats<Element>(sum, false));
}

}  // namespace

static_assert(kWave * kGroup == kLatent, "a wave has a row");

MLA_KERNEL __launch_bounds__(256) mla_sparse_reduce_bf16(SparseDecodeParams p) { merge_row<BF16>(p); }
MLA_KERNEL __launch_bounds__(256) mla_sparse_reduce_f16(SparseDecodeParams p) { merge_row<F16>(p); }

}  // namespace mla
