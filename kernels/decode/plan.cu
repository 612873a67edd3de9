// plan_decode on the device: the rule of plan_rule.h, one thread for a few units, then one for a piece.
//
// Every CTA sums the batch up for itself, which takes less time than waiting for another one would, and writes its
// share of the items. Sums over the units in front give the start of a unit on the line of costs, and the numbers of
// its first piece and partial; what is summed and in which order never varies.
#include "kernels/cuda/launch.h"
#include "kernels/decode/plan_rule.h"

namespace mla {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr int kItemsACta = 1024;  // that a CTA writes
constexpr int kMaxCtas = 32;
constexpr uint32_t kWholeWarp = 0xFFFFFFFF;

// What the units of a thread have in front of them, or (added up) what they bring.
struct Counts {
  int32_t pieces;
  int32_t partials;    // slots: pieces of split units, times the tiles of a unit
  int32_t last_group;  // that a piece lies in; -1: none

  __device__ Counts plus(const Counts& next) const {
    return {pieces + next.pieces, partials + next.partials, max_of(last_group, next.last_group)};
  }
  __device__ Counts shuffle_up(int distance) const {
    return {__shfl_up_sync(kWholeWarp, pieces, distance), __shfl_up_sync(kWholeWarp, partials, distance),
            __shfl_up_sync(kWholeWarp, last_group, distance)};
  }
  __device__ Counts shuffle(int lane) const {
    return {__shfl_sync(kWholeWarp, pieces, lane), __shfl_sync(kWholeWarp, partials, lane),
            __shfl_sync(kWholeWarp, last_group, lane)};
  }
  static __device__ Counts none() { return {0, 0, -1}; }
};

struct Cost {
  int64_t cost;

  __device__ Cost plus(const Cost& next) const { return {cost + next.cost}; }
  __device__ Cost shuffle_up(int distance) const { return {__shfl_up_sync(kWholeWarp, cost, distance)}; }
  __device__ Cost shuffle(int lane) const { return {__shfl_sync(kWholeWarp, cost, lane)}; }
  static __device__ Cost none() { return {0}; }
};

template <class T>
__device__ T scan_over_warp(T value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T before = value.shuffle_up(distance);
    if (lane >= distance) value = before.plus(value);
  }
  return value;
}

template <class T>
struct Sums {
  T before;  // over the threads in front of this one
  T total;
};

// `scratch`: [kMaxWarps], used by no one else until the next barrier.
template <class T>
__device__ Sums<T> sum_over_block(T value, T* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const T inclusive = scan_over_warp(value);
  if (lane == 31) scratch[warp] = inclusive;
  __syncthreads();
  const T all = scan_over_warp(lane < warps ? scratch[lane] : T::none());
  const T warps_before = all.shuffle(max_of(warp - 1, 0));
  const T lanes_before = inclusive.shuffle_up(1);
  T before = lane == 0 ? T::none() : lanes_before;
  if (warp > 0) before = warps_before.plus(before);
  return {before, all.shuffle(31)};
}

// In two halves of 26 bits, which leave room for 32 lanes. A sum over a batch stays below 2^57.
__device__ int64_t add_over_warp(int64_t value) {
  constexpr int kBits = 26;
  const auto low = static_cast<uint32_t>(value & ((1 << kBits) - 1)), high = static_cast<uint32_t>(value >> kBits);
  return (int64_t{__reduce_add_sync(kWholeWarp, high)} << kBits) + __reduce_add_sync(kWholeWarp, low);
}

__device__ BatchWork sum_over_warp(const BatchWork& work) {
  BatchWork sum;
  sum.requests = __reduce_add_sync(kWholeWarp, work.requests);
  sum.tiles = __reduce_add_sync(kWholeWarp, work.tiles);
  sum.blocks = add_over_warp(work.blocks);
  sum.tile_blocks = add_over_warp(work.tile_blocks);
  sum.longest = __reduce_max_sync(kWholeWarp, work.longest);
  sum.most_tiles = __reduce_max_sync(kWholeWarp, work.most_tiles);
  sum.fewest_tiles = __reduce_min_sync(kWholeWarp, work.fewest_tiles);
  return sum;
}

struct Trials {
  int32_t pieces[kEvenTrials];
};

struct Scratch {
  BatchWork work[kMaxWarps];
  Trials trials[kMaxWarps];
  Cost costs[kMaxWarps];
  Counts counts[kMaxWarps];
};

// The arrays of a thread's units, [threads] each: what is in front of them.
struct Fronts {
  int64_t* start;
  Counts* counts;

  __device__ Fronts(unsigned char* shared, int threads)
      : start(reinterpret_cast<int64_t*>(shared)), counts(reinterpret_cast<Counts*>(start + threads)) {}
  static __host__ __device__ size_t bytes(int threads) { return threads * (sizeof(int64_t) + sizeof(Counts)); }
};

struct Range {
  int32_t first, last;
};

__device__ Range range_of_thread(int32_t n, int thread) {
  const auto all = static_cast<uint32_t>(n);
  const uint32_t each = (all + blockDim.x - 1) / blockDim.x, first = thread * each;
  return {static_cast<int32_t>(min(first, all)), static_cast<int32_t>(min(first + each, all))};
}

__device__ SplitRule find_rule(const PlanDecodeParams& p, Scratch& scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const Range requests = range_of_thread(p.batch, threadIdx.x);
  BatchWork work = BatchWork::none();
  RequestWork last{};
  for (int32_t request = requests.first; request < requests.last; ++request) {
    last = request_work(p, request);
    work.add(last);
  }
  work = sum_over_warp(work);
  if (lane == 0) scratch.work[warp] = work;
  __syncthreads();
  SplitRule rule = split_rule(p, sum_over_warp(lane < warps ? scratch.work[lane] : BatchWork::none()));
  if (!even_trials(rule)) return rule;

  Trials trials{};
#pragma unroll
  for (int i = 0; i < kEvenTrials; ++i) {
    const int32_t capacity = even_capacity(rule, i);
    for (int32_t request = requests.first; request < requests.last; ++request) {
      const bool known = request + 1 == requests.last;
      trials.pieces[i] += even_pieces(rule, known ? last : request_work(p, request), capacity);
    }
    const int32_t sum = __reduce_add_sync(kWholeWarp, trials.pieces[i]);
    if (lane == 0) scratch.trials[warp].pieces[i] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = kEvenTrials - 1; i >= 0; --i) {
    const int32_t pieces = __reduce_add_sync(kWholeWarp, lane < warps ? scratch.trials[lane].pieces[i] : 0);
    if (pieces <= rule.groups) cut_evenly(rule, even_capacity(rule, i));
  }
  return rule;
}

struct FoundPiece {
  Piece piece;
  int32_t unit;
  int32_t number;         // in its unit
  int32_t count;          // of its unit
  int32_t first_partial;  // of its unit's first tile
  int32_t last_group;     // of the pieces in front of it
};

__device__ int32_t last_group_of(const SplitRule& rule, int32_t blocks, const UnitCut& cut, int32_t index) {
  return cut.count == 0 ? -1 : cut_piece(rule, blocks, cut, cut.count - 1, index + cut.count - 1).group;
}

// The index-th of all pieces: the thread that owns its unit by bisection, then the unit among the thread's.
__device__ FoundPiece find_piece(const PlanDecodeParams& p, const SplitRule& rule, const Fronts& fronts,
                                 int32_t index) {
  int below = 0;
  for (int step = blockDim.x / 2; step > 0; step /= 2) {
    if (fronts.counts[below + step].pieces <= index) below += step;
  }
  int64_t start = fronts.start[below];
  Counts front = fronts.counts[below];
  for (int32_t unit = range_of_thread(rule.units, below).first;; ++unit) {
    const int32_t blocks = unit_blocks(p, rule, unit);
    const UnitCut cut = cut_unit(p, rule, blocks, start);
    const int32_t i = index - front.pieces;
    if (i < cut.count) {
      const Piece piece = cut_piece(rule, blocks, cut, i, index);
      if (i > 0) front.last_group = cut_piece(rule, blocks, cut, i - 1, index - 1).group;
      return {piece, unit, i, cut.count, front.partials, front.last_group};
    }
    start += unit_cost(p, blocks);
    front = front.plus(
        {cut.count, cut.count > 1 ? cut.count * rule.width : 0, last_group_of(rule, blocks, cut, front.pieces)});
  }
}

__device__ void write_item(const PlanDecodeParams& p, const SplitRule& rule, const FoundPiece& found, int32_t tile,
                           int32_t position) {
  if (position >= p.plan.max_items) return;
  const int32_t request = rule.by_request ? found.unit : found.unit / p.plan.row_tiles;
  const int32_t kv_len = p.kv_lens[request];
  const int64_t end = int64_t{found.piece.block_end} * kBlockTokens;
  auto* item = reinterpret_cast<int4*>(p.plan.items + position);
  item[0] = make_int4(request, rule.by_request ? tile : found.unit % p.plan.row_tiles,
                      found.piece.block_begin * kBlockTokens, end < kv_len ? static_cast<int32_t>(end) : kv_len);
  item[1] = make_int4(found.count > 1 ? found.first_partial + tile * found.count + found.number : -1, 0, 0, 0);
}

__device__ void write_splits(const PlanDecodeParams& p, const SplitRule& rule, int32_t unit, int32_t count,
                             int32_t first_partial) {
  const int32_t tiles = rule.by_request ? p.plan.row_tiles : 1;
  TileSplits* splits = p.plan.tile_splits + int64_t{unit} * tiles;
  for (int32_t tile = 0; tile < tiles; ++tile) {
    const int32_t own = tile < rule.width ? count : 0;
    splits[tile] = {own > 1 ? first_partial + tile * own : -1, own};
  }
}

// One piece a group and tile, in the order of the parts: group by group, in a group tile by tile.
__device__ void write_grouped(const PlanDecodeParams& p, const SplitRule& rule, const Fronts& fronts, int32_t pieces,
                              int32_t* group_first) {
  for (int32_t i = threadIdx.x; i < pieces; i += blockDim.x) {
    const FoundPiece found = find_piece(p, rule, fronts, i);
    for (int32_t group = found.last_group + 1; group <= found.piece.group; ++group) group_first[group] = i;
    if (i + 1 == pieces) {
      for (int32_t group = found.piece.group + 1; group <= rule.groups; ++group) group_first[group] = pieces;
    }
  }
  __syncthreads();
  const int32_t thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  for (int32_t i = thread; i < pieces * rule.width; i += threads) {
    const int32_t index = i / rule.width, tile = i % rule.width;
    const FoundPiece found = find_piece(p, rule, fronts, index);
    const int32_t first = group_first[found.piece.group];
    const int32_t in_group = group_first[found.piece.group + 1] - first;
    write_item(p, rule, found, tile, first * rule.width + tile * in_group + index - first);
  }
  for (int32_t part = thread; part < rule.groups * rule.width; part += threads) {
    const int32_t group = part / rule.width, first = group_first[group];
    p.plan.part_offsets[part] = first * rule.width + part % rule.width * (group_first[group + 1] - first);
  }
}

// A group is a part: pieces are items.
__device__ void write_parts(const PlanDecodeParams& p, const SplitRule& rule, const Fronts& fronts, int32_t pieces) {
  const int32_t thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  for (int32_t i = thread; i < pieces; i += threads) {
    const FoundPiece found = find_piece(p, rule, fronts, i);
    write_item(p, rule, found, 0, i);
    for (int32_t part = found.last_group + 1; part <= found.piece.group; ++part) p.plan.part_offsets[part] = i;
  }
}

__global__ void __launch_bounds__(kMaxThreads) plan_kernel(const __grid_constant__ PlanDecodeParams p) {
  __shared__ Scratch scratch;
  extern __shared__ __align__(16) unsigned char shared[];
  const Fronts fronts(shared, blockDim.x);
  const SplitRule rule = find_rule(p, scratch);

  const Range units = range_of_thread(rule.units, threadIdx.x);
  Sums<Cost> costs{};
  if (rule.cut == Cut::kLine || rule.cut == Cut::kInvariant) {
    Cost own{0};
    for (int32_t unit = units.first; unit < units.last; ++unit) own.cost += unit_cost(p, unit_blocks(p, rule, unit));
    costs = sum_over_block(own, scratch.costs);
  }
  // Where pieces are dealt by their number, that is not known before the sum: their groups are taken from it below.
  const bool dealt = rule.cut == Cut::kWhole || rule.cut == Cut::kEven;
  Counts own = Counts::none();
  int64_t start = costs.before.cost;
  for (int32_t unit = units.first; unit < units.last; ++unit) {
    const int32_t blocks = unit_blocks(p, rule, unit);
    const UnitCut cut = cut_unit(p, rule, blocks, start);
    start += unit_cost(p, blocks);
    own = own.plus(
        {cut.count, cut.count > 1 ? cut.count * rule.width : 0, dealt ? -1 : last_group_of(rule, blocks, cut, 0)});
  }
  Sums<Counts> counts = sum_over_block(own, scratch.counts);
  const auto group_of = [&](int32_t index) { return rule.cut == Cut::kEven ? index : index / rule.units_a_group; };
  if (dealt && counts.before.pieces > 0) counts.before.last_group = group_of(counts.before.pieces - 1);
  if (dealt && counts.total.pieces > 0) counts.total.last_group = group_of(counts.total.pieces - 1);
  fronts.start[threadIdx.x] = costs.before.cost;
  fronts.counts[threadIdx.x] = counts.before;
  __syncthreads();

  const int32_t pieces = counts.total.pieces;
  if (rule.width == 1) {
    write_parts(p, rule, fronts, pieces);
  } else {
    write_grouped(p, rule, fronts, pieces, reinterpret_cast<int32_t*>(shared + Fronts::bytes(blockDim.x)));
  }
  const int32_t items = pieces * rule.width;
  const int32_t thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  for (int32_t i = items + thread; i < p.plan.max_items; i += threads) {
    reinterpret_cast<int4*>(p.plan.items + i)[0] = int4{};
    reinterpret_cast<int4*>(p.plan.items + i)[1] = int4{};
  }
  const int32_t first_idle = rule.width == 1 ? counts.total.last_group + 1 : rule.groups * rule.width;
  for (int32_t part = first_idle + thread; part <= p.plan.parts; part += threads) p.plan.part_offsets[part] = items;

  if (blockIdx.x != 0) return;
  Counts front = counts.before;
  start = costs.before.cost;
  for (int32_t unit = units.first; unit < units.last; ++unit) {
    const int32_t blocks = unit_blocks(p, rule, unit);
    const UnitCut cut = cut_unit(p, rule, blocks, start);
    write_splits(p, rule, unit, cut.count, front.partials);
    start += unit_cost(p, blocks);
    front.partials += cut.count > 1 ? cut.count * rule.width : 0;
  }
}

}  // namespace

Error plan_decode(const PlanDecodeParams& params, const Device& device) {
  const DecodePlan& plan = params.plan;
  if (plan.parts < 1 || plan.row_tiles < 1 || plan.tile_rows < 1) {
    return "jax_mla: plan_decode has " + std::to_string(plan.parts) + " parts, " + std::to_string(plan.row_tiles) +
           " row tiles and " + std::to_string(plan.tile_rows) + " rows a tile; each must be positive";
  }
  // Barriers and sums cost less with fewer warps.
  int threads = 128;
  while (threads < kMaxThreads && threads < int64_t{params.batch} * plan.row_tiles) threads *= 2;
  LaunchShape shape;
  shape.grid = dim3(min_of(ceil_div(max_of(plan.max_items, 1), kItemsACta), kMaxCtas));
  shape.block = dim3(threads);
  shape.shared_bytes = Fronts::bytes(threads);
  if (plan.row_tiles > 1) shape.shared_bytes += (min_of(plan.parts, kMaxGroupedParts) / 2 + 1) * sizeof(int32_t);
  return launch("plan_decode", plan_kernel, shape, device, params);
}

}  // namespace mla
