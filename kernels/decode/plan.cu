// plan_decode on the device: the rule of plan_rule.h by one CTA, so that it costs one launch and no scratch.
//
// Each thread owns a contiguous range of tiles. Sums over the ranges in front of it give the start of its tiles on the
// line of costs, then the positions of its items and partials; what is summed and in which order never varies.
#include "kernels/cuda/launch.h"
#include "kernels/decode/plan_rule.h"

namespace mla {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kWholeWarp = 0xFFFFFFFF;

struct Sums {
  int64_t before;  // over the threads in front of this one
  int64_t total;
};

// `scratch`: [kWarps], free for the next call at once.
__device__ Sums sum_over_block(int64_t value, int64_t* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t inclusive = value;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t other = __shfl_up_sync(kWholeWarp, inclusive, distance);
    if (lane >= distance) inclusive += other;
  }
  if (lane == 31) scratch[warp] = inclusive;
  __syncthreads();
  Sums sums{inclusive - value, 0};
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) sums.before += scratch[i];
    sums.total += scratch[i];
  }
  __syncthreads();
  return sums;
}

struct CutTile {
  TileCost cost;
  TileCut cut;
  int64_t start;
  int32_t tile;
  int64_t first_item;
  int64_t first_partial;  // -1: not split
};

__device__ void write_piece(const PlanDecodeParams& p, const CutTile& t, int32_t piece_index, int64_t length) {
  const int64_t index = t.first_item + piece_index;
  if (index >= p.plan.max_items) return;
  const Piece piece = cut_piece(p, t.cost, t.cut, piece_index, t.start, length);
  const int32_t request = t.tile / p.plan.row_tiles;
  const int32_t kv_len = p.kv_lens[request];
  const int64_t end = int64_t{piece.block_end} * kBlockTokens;
  const int32_t partial = t.first_partial < 0 ? -1 : static_cast<int32_t>(t.first_partial) + piece_index;
  auto* item = reinterpret_cast<int4*>(p.plan.items + index);
  item[0] = make_int4(request, t.tile % p.plan.row_tiles, piece.block_begin * kBlockTokens,
                      end < kv_len ? static_cast<int32_t>(end) : kv_len);
  item[1] = make_int4(partial, 0, 0, 0);
  atomicAdd(p.plan.part_offsets + piece.part + 1, 1);
}

__device__ CutTile broadcast(const CutTile& t, int lane) {
  CutTile copy;
  copy.cost.blocks = __shfl_sync(kWholeWarp, t.cost.blocks, lane);
  copy.cost.cost = __shfl_sync(kWholeWarp, t.cost.cost, lane);
  copy.cut.count = __shfl_sync(kWholeWarp, t.cut.count, lane);
  copy.cut.part = __shfl_sync(kWholeWarp, t.cut.part, lane);
  copy.cut.chunk = __shfl_sync(kWholeWarp, t.cut.chunk, lane);
  copy.start = __shfl_sync(kWholeWarp, t.start, lane);
  copy.tile = __shfl_sync(kWholeWarp, t.tile, lane);
  copy.first_item = __shfl_sync(kWholeWarp, t.first_item, lane);
  copy.first_partial = __shfl_sync(kWholeWarp, t.first_partial, lane);
  return copy;
}

__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ PlanDecodeParams p) {
  __shared__ int64_t scratch[kWarps];
  const int thread = threadIdx.x, lane = thread % 32;
  const int64_t tiles = int64_t{p.batch} * p.plan.row_tiles;
  const int64_t per_thread = (tiles + kThreads - 1) / kThreads;
  const int64_t first = min(thread * per_thread, tiles), last = min(first + per_thread, tiles);

  for (int i = thread; i <= p.plan.parts; i += kThreads) p.plan.part_offsets[i] = 0;  // counts, until they are summed

  int64_t cost = 0;
  for (int64_t tile = first; tile < last; ++tile) cost += tile_cost(p, static_cast<int32_t>(tile)).cost;
  const Sums line = sum_over_block(cost, scratch);
  const int64_t length = part_length(p, line.total);

  int64_t start = line.before, items = 0, partials = 0;
  for (int64_t tile = first; tile < last; ++tile) {
    const TileCost c = tile_cost(p, static_cast<int32_t>(tile));
    const int32_t count = cut_tile(p, c, start, length).count;
    start += c.cost;
    items += count;
    partials += count >= 2 ? count : 0;
  }
  const Sums item_sums = sum_over_block(items, scratch);
  const Sums partial_sums = sum_over_block(partials, scratch);

  CutTile t{};
  t.start = line.before;
  t.first_item = item_sums.before;
  int64_t next_partial = partial_sums.before;
  for (int64_t i = 0; i < per_thread; ++i) {  // as often in every thread: the lanes work together below
    t.cut.count = 0;
    if (first + i < last) {
      t.tile = static_cast<int32_t>(first + i);
      t.cost = tile_cost(p, t.tile);
      t.cut = cut_tile(p, t.cost, t.start, length);
      t.first_partial = t.cut.count >= 2 ? next_partial : -1;
      p.plan.tile_splits[t.tile] = {static_cast<int32_t>(t.first_partial), t.cut.count};
      if (t.cut.count >= 1) write_piece(p, t, 0, length);
    }
    // A tile may have as many pieces as there are parts: the warp shares them.
    for (uint32_t split = __ballot_sync(kWholeWarp, t.cut.count >= 2); split != 0; split &= split - 1) {
      const CutTile shared = broadcast(t, __ffs(split) - 1);
      for (int32_t piece = 1 + lane; piece < shared.cut.count; piece += 32) write_piece(p, shared, piece, length);
    }
    if (first + i < last) {
      t.start += t.cost.cost;
      t.first_item += t.cut.count;
      next_partial += t.cut.count >= 2 ? t.cut.count : 0;
    }
  }

  auto* words = reinterpret_cast<int4*>(p.plan.items);
  const int64_t unused = min(item_sums.total, int64_t{p.plan.max_items});
  for (int64_t i = 2 * unused + thread; i < 2 * int64_t{p.plan.max_items}; i += kThreads) words[i] = int4{};

  // part_offsets[p + 1] holds the items of part p: sums of them are the offsets.
  __syncthreads();
  int64_t carried = 0;
  for (int32_t base = 1; base <= p.plan.parts; base += kThreads) {
    const int32_t i = base + thread;
    const int64_t count = i <= p.plan.parts ? p.plan.part_offsets[i] : 0;
    const Sums sums = sum_over_block(count, scratch);
    if (i <= p.plan.parts) p.plan.part_offsets[i] = static_cast<int32_t>(carried + sums.before + count);
    carried += sums.total;
  }
}

}  // namespace

Error plan_decode(const PlanDecodeParams& params, const Device& device) {
  const DecodePlan& plan = params.plan;
  if (plan.parts < 1 || plan.row_tiles < 1 || plan.tile_rows < 1) {
    return "jax_mla: plan_decode has " + std::to_string(plan.parts) + " parts, " + std::to_string(plan.row_tiles) +
           " row tiles and " + std::to_string(plan.tile_rows) + " rows a tile; each must be positive";
  }
  return launch("plan_decode", plan_kernel, {1, kThreads}, device, params);
}

}  // namespace mla
