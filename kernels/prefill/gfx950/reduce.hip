// The split tiles' rows, from their pieces' partial results in the order of the keys: 32 lanes a row, four columns
// each.
#include "kernels/prefill/gfx9/output.h"
#include "kernels/prefill/gfx950/shape.h"

namespace mla::gfx9_prefill::fp8 {
namespace {

constexpr int kLaneColumns = 8;
constexpr int kRowLanes = kNope / kLaneColumns;

// `index`: of the row in the first piece, `step`: from a piece to the next.
__device__ __forceinline__ void reduce_row(const PrefillParams& p, const Scratch& scratch, int64_t index, int64_t step,
                                           int32_t count, int64_t row, int column) {
  float highest = -INFINITY;
  for (int32_t i = 0; i < count; ++i) highest = fmaxf(highest, scratch.lse[index + i * step]);
  F32x4 out[2] = {};
  float sum = 0;
  for (int32_t i = 0; i < count; ++i) {
    const float lse = scratch.lse[index + i * step];
    if (lse == -INFINITY) continue;
    const float weight = expf(lse - highest);
    sum += weight;
    const auto* partial = reinterpret_cast<const F32x4*>(scratch.out + (index + i * step) * kNope + column);
    for (int half = 0; half < 2; ++half) out[half] += weight * partial[half];
  }
  const bool empty = sum == 0;
  const float lse = empty ? -INFINITY : highest + logf(sum);
  for (F32x4& half : out) half *= empty ? 0 : 1 / sum;
  if (!p.merge) {
    *reinterpret_cast<U32x4*>(static_cast<BF16*>(p.out) + row * kNope + column) =
        U32x4{pack<BF16>(out[0].xy), pack<BF16>(out[0].zw), pack<BF16>(out[1].xy), pack<BF16>(out[1].zw)};
    if (column == 0) p.lse[row] = lse;
    return;
  }
  if (empty) return;
  const MergeWeights weights = merge_weights(p.lse[row], lse);
  if (weights.keeps) return;
  auto* target = reinterpret_cast<F32x4*>(static_cast<float*>(p.out) + row * kNope + column);
  for (int half = 0; half < 2; ++half) target[half] = merged(weights, target + half, out[half]);
  if (column == 0) p.lse[row] = weights.lse;
}

// A grid of (split tiles, heads, parts of a tile).
__device__ __forceinline__ void reduce_part(const PrefillParams& p) {
  const Scratch scratch(p, limits_of(p));
  if (static_cast<int32_t>(blockIdx.x) >= scratch.plan->split_tiles) return;
  const SplitTile tile = scratch.split_tiles[blockIdx.x];
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const auto head = static_cast<int32_t>(blockIdx.y);
  const int first = static_cast<int>(blockIdx.z) * kReducedRows + static_cast<int>(threadIdx.x) / kRowLanes;
  for (int row = first; row < first + kReducedRows && row < tile.rows; row += kReduceThreads / kRowLanes) {
    reduce_row(p, scratch, (int64_t{tile.first_partial} * p.heads + head) * kTileQueries + row,
               int64_t{p.heads} * kTileQueries, tile.count, int64_t{tile.first_query + row} * p.heads + head,
               lane * kLaneColumns);
  }
}

}  // namespace
}  // namespace mla::gfx9_prefill::fp8

MLA_KERNEL __launch_bounds__(mla::gfx9_prefill::fp8::kReduceThreads) mla_prefill_fp8_reduce(mla::PrefillParams p) {
  mla::gfx9_prefill::fp8::reduce_part(p);
}
