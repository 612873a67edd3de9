// plan_decode on the device: the rule of plan_rule.h, one thread for a unit, then one for a piece.
//
// Every CTA sums the batch up for itself, which takes less time than waiting for another one would, and writes its
// share of the items. Sums over the units in front give the start of a unit on the line of costs, and the numbers of
// its first piece and partial; what is summed and in which order never varies.
//
// Alone on the device for microseconds, the kernel pays for each new instruction more than for its execution: loops
// stay loops.
#include "kernels/cuda/launch.h"
#include "kernels/decode/plan_rule.h"

namespace mla {
namespace {

constexpr int kMinThreads = 256;  // a warp for each even trial
constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr int kItemsACta = 1024;  // that a CTA writes
constexpr int kMaxCtas = 32;
constexpr uint32_t kWholeWarp = 0xFFFFFFFF;
static_assert(kMinThreads / 32 >= kEvenTrials, "each trial has a warp");

// What a unit brings, or what is in front of it.
struct Counts {
  int32_t pieces;
  int32_t partials;    // slots: pieces of split units, times the tiles of a unit
  int32_t last_group;  // that a piece lies in; -1: none

  static __device__ Counts none() { return {0, 0, -1}; }
  __device__ Counts plus(const Counts& next) const {
    return {pieces + next.pieces, partials + next.partials, max_of(last_group, next.last_group)};
  }
  __device__ Counts shuffle_up(int distance) const {
    return {__shfl_up_sync(kWholeWarp, pieces, distance), __shfl_up_sync(kWholeWarp, partials, distance),
            __shfl_up_sync(kWholeWarp, last_group, distance)};
  }
};

struct Cost {
  int32_t cost;  // on the line

  static __device__ Cost none() { return {0}; }
  __device__ Cost plus(const Cost& next) const { return {cost + next.cost}; }
  __device__ Cost shuffle_up(int distance) const { return {__shfl_up_sync(kWholeWarp, cost, distance)}; }
};

template <class T>
__device__ __forceinline__ T scan_over_warp(T value) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int distance = 1; distance < 32; distance *= 2) {
    const T before = value.shuffle_up(distance);
    if (lane >= distance) value = before.plus(value);
  }
  return value;
}

// What is in front of each thread: `carry` and the threads before. Becomes the carry of the next call. `scratch`:
// [kMaxWarps + 1], used by no one else until the barrier after next.
template <class T>
__device__ __forceinline__ T scan_over_block(T value, T& carry, T* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const T inclusive = scan_over_warp(value);
  if (lane == 31) scratch[warp] = inclusive;
  T before = inclusive.shuffle_up(1);
  if (lane == 0) before = T::none();
  __syncthreads();
  if (warp == 0) {
    const T all = scan_over_warp(lane < warps ? scratch[lane] : T::none());
    __syncwarp();
    scratch[lane + 1] = all;
    if (lane == 0) scratch[0] = T::none();
  }
  __syncthreads();
  const T front = carry.plus(scratch[warp]).plus(before);
  carry = carry.plus(scratch[warps]);
  return front;
}

__device__ __forceinline__ BatchWork sum_over_warp(const BatchWork& work) {
  BatchWork sum;
  sum.requests = __reduce_add_sync(kWholeWarp, work.requests);
  sum.tiles = __reduce_add_sync(kWholeWarp, work.tiles);
  sum.blocks = __reduce_add_sync(kWholeWarp, work.blocks);
  sum.tile_blocks = __reduce_add_sync(kWholeWarp, work.tile_blocks);
  sum.longest = __reduce_max_sync(kWholeWarp, work.longest);
  sum.most_tiles = __reduce_max_sync(kWholeWarp, work.most_tiles);
  sum.fewest_tiles = __reduce_min_sync(kWholeWarp, work.fewest_tiles);
  return sum;
}

// A unit as the threads that write its pieces see it.
struct Unit {
  UnitCut cut;
  Counts front;
  int32_t blocks;
};

struct Scratch {
  union {
    BatchWork work[kMaxWarps];
    Cost costs[kMaxWarps + 1];
  };
  int32_t trial_pieces[kEvenTrials];
  Counts counts[kMaxWarps + 1];
};

__device__ __forceinline__ SplitRule find_rule(const PlanDecodeParams& p, Scratch& scratch) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, warps = blockDim.x / 32;
  const int32_t longest = most_blocks(p);
  BatchWork work = BatchWork::none();
#pragma unroll 1
  for (int32_t request = thread; request < p.batch; request += blockDim.x) work.add(request_work(p, request, longest));
#pragma unroll 1
  for (int step = 0; step < 2; ++step) {  // over the warp, then over the warps
    work = sum_over_warp(work);
    if (step == 1) break;
    if (lane == 0) scratch.work[warp] = work;
    __syncthreads();
    work = lane < warps ? scratch.work[lane] : BatchWork::none();
  }
  SplitRule rule = split_rule(p, work);
  if (!even_trials(rule)) return rule;

  if (warp < kEvenTrials) {
    const int32_t capacity = even_capacity(rule, warp);
    int32_t pieces = 0;
#pragma unroll 2
    for (int32_t request = lane; request < p.batch; request += 32) {
      pieces += even_pieces(rule, request_work(p, request, longest), capacity);
    }
    pieces = __reduce_add_sync(kWholeWarp, pieces);
    if (lane == 0) scratch.trial_pieces[warp] = pieces;
  }
  __syncthreads();
  const bool fits = lane < kEvenTrials && scratch.trial_pieces[lane] <= rule.groups;
  const uint32_t fitting = __ballot_sync(kWholeWarp, fits);
  if (fitting != 0) cut_evenly(rule, even_capacity(rule, __ffs(fitting) - 1));
  return rule;
}

__device__ __forceinline__ void write_splits(const PlanDecodeParams& p, const SplitRule& rule, int32_t unit,
                                             int32_t count, int32_t first_partial) {
  const int32_t tiles = rule.by_request ? p.plan.row_tiles : 1;
  TileSplits* splits = p.plan.tile_splits + int64_t{unit} * tiles;
#pragma unroll 1
  for (int32_t tile = 0; tile < tiles; ++tile) {
    const int32_t own = tile < rule.width ? count : 0;
    splits[tile] = {own > 1 ? first_partial + tile * own : -1, own};
  }
}

// Items of a part stand together: with groups of several parts, an item's place depends on how many there are in its
// group, `group_first` of the next group less that of its own. So there is a pass over the pieces to find those first.
struct Output {
  bool grouped;
  int32_t* group_first;  // [groups + 1], shared
  int32_t thread, threads;
};

__device__ __forceinline__ void write_pieces(const PlanDecodeParams& p, const SplitRule& rule, const Output& output,
                                             bool places_known, int32_t first_unit, const Unit* units, int32_t first,
                                             int32_t last) {
  // All CTAs find the places, each for itself; then they share the items.
  const bool find_places = output.grouped && !places_known;
  const int32_t width = find_places ? 1 : rule.width;
  const int32_t step = find_places ? blockDim.x : output.threads;
#pragma unroll 1
  for (int32_t i = find_places ? threadIdx.x : output.thread; i < (last - first) * width; i += step) {
    const int32_t in_order = width == 1 ? i : divide(i, width);
    const int32_t index = first + in_order, tile = i - in_order * width;
    int below = 0;  // the last unit that begins at or before this piece
#pragma unroll 1
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
      if (units[below + half].front.pieces <= index) below += half;
    }
    const Unit unit = units[below];
    const int32_t number = index - unit.front.pieces;
    const int32_t group = piece_group(rule, unit.cut, number, index);
    int32_t place = index;
    if (!output.grouped || find_places) {
      // The groups up to this piece's begin here, unless a piece in front is in them too.
      const int32_t before = number > 0 ? piece_group(rule, unit.cut, number - 1, index - 1) : unit.front.last_group;
      int32_t* offsets = find_places ? output.group_first : p.plan.part_offsets;
#pragma unroll 1
      for (int32_t g = before + 1; g <= group; ++g) offsets[g] = index;
      if (find_places) continue;
    } else {
      const int32_t group_first = output.group_first[group];
      const int32_t in_group = output.group_first[group + 1] - group_first;
      place = group_first * width + tile * in_group + index - group_first;
    }
    if (place >= p.plan.max_items) continue;
    const int32_t position = first_unit + below;
    const int32_t request = rule.by_request ? position : divide(position, p.plan.row_tiles);
    const int32_t row_tile = rule.by_request ? tile : position - request * p.plan.row_tiles;
    const int32_t partial = unit.cut.count > 1 ? unit.front.partials + tile * unit.cut.count + number : -1;
    auto* item = reinterpret_cast<int4*>(p.plan.items + place);
    item[0] = make_int4(request, row_tile, piece_begin(rule, unit.cut, number, unit.blocks) * kBlockTokens,
                        piece_end(rule, unit.cut, number, unit.blocks, p.kv_lens[request]));
    item[1] = make_int4(partial, 0, 0, 0);
  }
}

__global__ void __launch_bounds__(kMaxThreads) plan_kernel(const __grid_constant__ PlanDecodeParams p) {
  __shared__ Scratch scratch;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* units = reinterpret_cast<Unit*>(shared);  // [threads]
  const SplitRule rule = find_rule(p, scratch);
  const bool on_line = rule.cut == Cut::kLine || rule.cut == Cut::kInvariant;
  Output output;
  output.grouped = rule.width > 1;
  output.group_first = reinterpret_cast<int32_t*>(units + blockDim.x);
  output.thread = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  output.threads = static_cast<int32_t>(gridDim.x * blockDim.x);

  Counts carry = Counts::none();
  // The second pass finds the first one's units where it left them, if they are all there.
  const bool all_kept = output.grouped && rule.units <= static_cast<int32_t>(blockDim.x);
#pragma unroll 1
  for (int pass = output.grouped ? 0 : 1; pass < 2; ++pass) {
    if (pass == 1 && all_kept) {
      __syncthreads();  // the places are there
      const int32_t number = threadIdx.x;
      if (blockIdx.x == 0 && number < rule.units) {
        write_splits(p, rule, number, units[number].cut.count, units[number].front.partials);
      }
      write_pieces(p, rule, output, /*places_known=*/true, 0, units, 0, carry.pieces);
      break;
    }
    Cost line = Cost::none();
    carry = Counts::none();
#pragma unroll 1
    for (int32_t first_unit = 0; first_unit < rule.units; first_unit += blockDim.x) {
      __syncthreads();  // the scratch and the units are free
      const int32_t number = first_unit + static_cast<int32_t>(threadIdx.x), first_piece = carry.pieces;
      Unit unit;
      unit.blocks = number < rule.units ? unit_blocks(p, rule, number) : 0;
      const int32_t start = on_line ? scan_over_block(Cost{unit_cost(p, unit.blocks)}, line, scratch.costs).cost : 0;
      unit.cut = cut_unit(p, rule, unit.blocks, start);
      Counts own{unit.cut.count, unit.cut.count > 1 ? unit.cut.count * rule.width : 0, -1};
      if (on_line && own.pieces > 0) own.last_group = piece_group(rule, unit.cut, own.pieces - 1, 0);
      unit.front = scan_over_block(own, carry, scratch.counts);
      if (!on_line && unit.front.pieces > 0) unit.front.last_group = group_in_turn(rule, unit.front.pieces - 1);
      units[threadIdx.x] = unit;
      if (pass == 1 && blockIdx.x == 0 && number < rule.units) {
        write_splits(p, rule, number, unit.cut.count, unit.front.partials);
      }
      __syncthreads();
      write_pieces(p, rule, output, pass == 1, first_unit, units, first_piece, carry.pieces);
    }
    if (pass == 1) break;
    const int32_t last_group = on_line || carry.pieces == 0 ? carry.last_group : group_in_turn(rule, carry.pieces - 1);
    for (int32_t g = last_group + 1 + threadIdx.x; g <= rule.groups; g += blockDim.x) {
      output.group_first[g] = carry.pieces;
    }
  }

  const int32_t items = carry.pieces * rule.width;
#pragma unroll 1
  for (int32_t i = items + output.thread; i < p.plan.max_items; i += output.threads) {
    auto* item = reinterpret_cast<int4*>(p.plan.items + i);
    item[0] = int4{};
    item[1] = int4{};
  }
  int32_t first_part = 0;
  if (!output.grouped) {
    first_part = 1 + (on_line || carry.pieces == 0 ? carry.last_group : group_in_turn(rule, carry.pieces - 1));
  }
#pragma unroll 1
  for (int32_t part = first_part + output.thread; part <= p.plan.parts; part += output.threads) {
    int32_t offset = items;
    if (output.grouped && part < rule.groups * rule.width) {
      const int32_t group = divide(part, rule.width), first = output.group_first[group];
      offset = first * rule.width + (part - group * rule.width) * (output.group_first[group + 1] - first);
    }
    p.plan.part_offsets[part] = offset;
  }
}

}  // namespace

Error plan_decode(const PlanDecodeParams& params, const Device& device) {
  const DecodePlan& plan = params.plan;
  if (plan.parts < 1 || plan.row_tiles < 1 || plan.tile_rows < 1) {
    return "jax_mla: plan_decode has " + std::to_string(plan.parts) + " parts, " + std::to_string(plan.row_tiles) +
           " row tiles and " + std::to_string(plan.tile_rows) + " rows a tile; each must be positive";
  }
  int threads = kMinThreads;
  while (threads < kMaxThreads && threads < int64_t{params.batch} * plan.row_tiles) threads *= 2;
  LaunchShape shape;
  shape.grid = dim3(min_of(ceil_div(max_of(plan.max_items, 1), kItemsACta), kMaxCtas));
  shape.block = dim3(threads);
  shape.shared_bytes = threads * sizeof(Unit);
  if (plan.row_tiles > 1) shape.shared_bytes += (min_of(plan.parts, kMaxGroupedParts) / 2 + 1) * sizeof(int32_t);
  return launch("plan_decode", plan_kernel, shape, device, params);
}

}  // namespace mla
