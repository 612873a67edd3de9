// plan_decode's kernel, for CUDA and HIP: the rule of plan_rule.h, one thread for a unit, then one for a piece.
//
// Every block sums the batch up for itself, which takes less time than waiting for another one would, and writes its
// share of the items. Sums over the units in front give the start of a unit on the line of costs, and the numbers of
// its first piece and partial; what is summed and in which order never varies.
//
// Alone on the device for microseconds, the kernel pays for each new instruction more than for its execution: loops
// stay loops.
#pragma once

#include "kernels/decode/plan_rule.h"
#include "kernels/gpu.h"

namespace mla {

constexpr int kPlanMinThreads = kWave * kEvenTrials;  // a wave for each trial
constexpr int kPlanMaxThreads = 1024;
constexpr int kPlanMaxWaves = kPlanMaxThreads / kWave;

// What a unit brings, or what is in front of it.
struct UnitCounts {
  int32_t pieces;
  int32_t partials;    // slots: pieces of split units, times the tiles of a unit
  int32_t last_group;  // that a piece lies in; -1: none

  static __device__ UnitCounts none() { return {0, 0, -1}; }
  __device__ UnitCounts plus(const UnitCounts& next) const {
    return {pieces + next.pieces, partials + next.partials, max_of(last_group, next.last_group)};
  }
  __device__ UnitCounts shuffle_up(int distance) const {
    return {mla::shuffle_up(pieces, distance), mla::shuffle_up(partials, distance),
            mla::shuffle_up(last_group, distance)};
  }
};

struct UnitCost {
  int32_t cost;  // on the line

  static __device__ UnitCost none() { return {0}; }
  __device__ UnitCost plus(const UnitCost& next) const { return {cost + next.cost}; }
  __device__ UnitCost shuffle_up(int distance) const { return {mla::shuffle_up(cost, distance)}; }
};

template <class T>
__device__ __forceinline__ T scan_over_wave(T value) {
  const int lane = threadIdx.x % kWave;
#pragma unroll 1
  for (int distance = 1; distance < kWave; distance *= 2) {
    const T before = value.shuffle_up(distance);
    if (lane >= distance) value = before.plus(value);
  }
  return value;
}

// What is in front of each thread: `carry` and the threads before. Becomes the carry of the next call. `scratch`:
// [kWave + 1], used by no one else until the barrier after next.
template <class T>
__device__ __forceinline__ T scan_over_block(T value, T& carry, T* scratch) {
  const int lane = threadIdx.x % kWave, wave = threadIdx.x / kWave, waves = blockDim.x / kWave;
  const T inclusive = scan_over_wave(value);
  if (lane == kWave - 1) scratch[wave] = inclusive;
  T before = inclusive.shuffle_up(1);
  if (lane == 0) before = T::none();
  __syncthreads();
  if (wave == 0) {
    const T all = scan_over_wave(lane < waves ? scratch[lane] : T::none());
    wave_barrier();
    scratch[lane + 1] = all;
    if (lane == 0) scratch[0] = T::none();
  }
  __syncthreads();
  const T front = carry.plus(scratch[wave]).plus(before);
  carry = carry.plus(scratch[waves]);
  return front;
}

__device__ __forceinline__ BatchWork sum_over_wave(const BatchWork& work) {
  BatchWork sum;
  sum.requests = wave_sum(work.requests);
  sum.tiles = wave_sum(work.tiles);
  sum.blocks = wave_sum(work.blocks);
  sum.tile_blocks = wave_sum(work.tile_blocks);
  sum.longest = wave_max(work.longest);
  sum.most_tiles = wave_max(work.most_tiles);
  sum.fewest_tiles = wave_min(work.fewest_tiles);
  return sum;
}

// A unit as the threads that write its pieces see it.
struct PlanUnit {
  UnitCut cut;
  UnitCounts front;
  int32_t blocks;
};
static_assert(sizeof(PlanUnit) == kPlanUnitBytes);

struct PlanScratch {
  union {
    BatchWork work[kPlanMaxWaves];
    UnitCost costs[kWave + 1];
  };
  int32_t trial_pieces[kEvenTrials];
  UnitCounts counts[kWave + 1];
};

__device__ __forceinline__ SplitRule find_rule(const PlanDecodeParams& p, PlanScratch& scratch) {
  const int thread = threadIdx.x, lane = thread % kWave, wave = thread / kWave, waves = blockDim.x / kWave;
  const int32_t longest = most_blocks(p);
  BatchWork work = BatchWork::none();
#pragma unroll 1
  for (int32_t request = thread; request < p.batch; request += blockDim.x) work.add(request_work(p, request, longest));
#pragma unroll 1
  for (int step = 0; step < 2; ++step) {  // over the wave, then over the waves
    work = sum_over_wave(work);
    if (step == 1) break;
    if (lane == 0) scratch.work[wave] = work;
    __syncthreads();
    work = lane < waves ? scratch.work[lane] : BatchWork::none();
  }
  SplitRule rule = split_rule(p, work);
  if (!even_trials(rule)) return rule;

  if (wave < kEvenTrials) {
    const int32_t capacity = even_capacity(rule, wave);
    int32_t pieces = 0;
#pragma unroll 2
    for (int32_t request = lane; request < p.batch; request += kWave) {
      pieces += even_pieces(rule, request_work(p, request, longest), capacity);
    }
    pieces = wave_sum(pieces);
    if (lane == 0) scratch.trial_pieces[wave] = pieces;
  }
  __syncthreads();
  const bool fits = lane < kEvenTrials && scratch.trial_pieces[lane] <= rule.groups;
  const LaneMask fitting = ballot(fits);
  if (fitting != 0) cut_evenly(rule, even_capacity(rule, first_lane(fitting)));
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
struct PlanOutput {
  bool grouped;
  int32_t* group_first;  // [groups + 1], shared
  int32_t thread, threads;
};

__device__ __forceinline__ void write_pieces(const PlanDecodeParams& p, const SplitRule& rule, const PlanOutput& output,
                                             bool places_known, int32_t first_unit, const PlanUnit* units,
                                             int32_t first, int32_t last) {
  // All blocks find the places, each for itself; then they share the items.
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
    const PlanUnit unit = units[below];
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
    auto* item = reinterpret_cast<I32x4*>(p.plan.items + place);
    item[0] = i32x4(request, row_tile, piece_begin(rule, unit.cut, number, unit.blocks) * kBlockTokens,
                    piece_end(rule, unit.cut, number, unit.blocks, p.kv_lens[request]));
    item[1] = i32x4(partial, 0, 0, 0);
  }
}

// `dynamic`: plan_shared_bytes().
__device__ __forceinline__ void make_plan(const PlanDecodeParams& p, unsigned char* dynamic) {
  __shared__ PlanScratch scratch;
  auto* units = reinterpret_cast<PlanUnit*>(dynamic);  // [threads]
  const SplitRule rule = find_rule(p, scratch);
  const bool on_line = rule.cut == Cut::kLine || rule.cut == Cut::kInvariant;
  PlanOutput output;
  output.grouped = rule.width > 1;
  output.group_first = reinterpret_cast<int32_t*>(units + blockDim.x);
  output.thread = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  output.threads = static_cast<int32_t>(gridDim.x * blockDim.x);

  UnitCounts carry = UnitCounts::none();
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
    UnitCost line = UnitCost::none();
    carry = UnitCounts::none();
#pragma unroll 1
    for (int32_t first_unit = 0; first_unit < rule.units; first_unit += blockDim.x) {
      __syncthreads();  // the scratch and the units are free
      const int32_t number = first_unit + static_cast<int32_t>(threadIdx.x), first_piece = carry.pieces;
      PlanUnit unit;
      unit.blocks = number < rule.units ? unit_blocks(p, rule, number) : 0;
      const int32_t start =
          on_line ? scan_over_block(UnitCost{unit_cost(p, unit.blocks)}, line, scratch.costs).cost : 0;
      unit.cut = cut_unit(p, rule, unit.blocks, start);
      UnitCounts own{unit.cut.count, unit.cut.count > 1 ? unit.cut.count * rule.width : 0, -1};
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
    auto* item = reinterpret_cast<I32x4*>(p.plan.items + i);
    item[0] = I32x4{};
    item[1] = I32x4{};
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

}  // namespace mla
