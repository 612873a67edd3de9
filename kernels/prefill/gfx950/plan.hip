// The work of a call, from the lengths on the device: tiles, those that cost much cut over their keys, the costliest
// first. One wave.
#include "kernels/prefill/gfx9/tile.h"
#include "kernels/prefill/gfx950/shape.h"

namespace mla::gfx9_prefill::fp8 {
namespace {

constexpr int kBuckets = 256;  // of costs, for the order

struct Memory {
  int32_t tiles_before[kWave];  // of the requests at hand
  Request requests[kWave];
  int32_t places[kBuckets];  // pieces of a bucket, then where its next one goes
};

__device__ __forceinline__ int32_t lane_value(int32_t value, int lane) {
  return __builtin_amdgcn_readlane(value, lane);
}

// Blocks of keys that a tile has to go through.
__device__ __forceinline__ int32_t blocks_of(const Tile& tile, bool causal) {
  return (visible_keys(tile, causal, tile.rows - 1) + kBlockKeys - 1) / kBlockKeys;
}

// f(tile, exists) with a tile for each lane, by all lanes together, until there are no more. Tiles whose results are
// there already, as those without keys are where a carry is merged into, are left out.
template <class F>
__device__ __forceinline__ void for_tiles(const PrefillParams& p, Memory& memory, F f) {
  const int lane = lane_id();
#pragma unroll 1
  for (int32_t first = 0; first < p.batch + 2; first += kWave) {
    Request r{};
    if (first + lane < p.batch + 2) r = read_request<kTileQueries>(p, first + lane);
    const int32_t end = sum_up_to_lane(r.tiles), all = lane_value(end, kWave - 1);
    wave_barrier();
    memory.tiles_before[lane] = end - r.tiles;
    memory.requests[lane] = r;
    wave_barrier();
#pragma unroll 1
    for (int32_t at = 0; at < all; at += kWave) {
      const int32_t index = at + lane;
      int owner = 0;  // the last request in front of which there are no more than `index` tiles
#pragma unroll
      for (int step = kWave / 2; step > 0; step /= 2) {
        if (memory.tiles_before[owner + step] <= index) owner += step;
      }
      const Request mine = memory.requests[owner];
      Tile tile{};
      tile.first_query = mine.q_begin + (index - memory.tiles_before[owner]) * kTileQueries;
      tile.rows = clamp(mine.q_end - tile.first_query, 0, kTileQueries);
      tile.kv_begin = mine.kv_begin;
      tile.kv_end = mine.kv_end;
      tile.diagonal = mine.diagonal;
      const bool exists = index < all && tile.rows > 0;
      f(tile, exists && !(p.merge && blocks_of(tile, p.causal) == 0));
    }
  }
}

__device__ __forceinline__ int64_t sum_over_wave(int64_t value) {
#pragma unroll
  for (int mask = 1; mask < kWave; mask *= 2) {
    const auto low = static_cast<uint32_t>(value), high = static_cast<uint32_t>(value >> 32);
    value += static_cast<int64_t>(uint64_t{shuffle_xor(high, mask)} << 32 | shuffle_xor(low, mask));
  }
  return value;
}

// How a tile is cut: into `count` pieces of `blocks` blocks, the last one of what is left.
struct Cut {
  int32_t count, blocks, bucket;
};

__device__ __forceinline__ Cut cut_of(int32_t blocks, int32_t most) {
  Cut cut{1, blocks, 0};
  if (blocks > most) {
    cut.count = (blocks + most - 1) / most;
    cut.blocks = (blocks + cut.count - 1) / cut.count;
    cut.count = (blocks + cut.blocks - 1) / cut.blocks;
  }
  const float share = static_cast<float>(cut.blocks) / static_cast<float>(most);
  cut.bucket = kBuckets - 1 - clamp(static_cast<int32_t>(share * (kBuckets - 1)), 0, kBuckets - 1);
  return cut;
}

__device__ __forceinline__ void plan(const PrefillParams& p, Memory& memory) {
  const Limits limits = limits_of(p);
  const Scratch scratch(p, limits);
  const int lane = lane_id();

  int64_t cost = 0;
  for_tiles(p, memory, [&](const Tile& tile, bool exists) { cost += exists ? blocks_of(tile, p.causal) : 0; });
  cost = sum_over_wave(cost) * p.heads;
  const int64_t share = (cost + kWorkgroups - 1) / kWorkgroups;
  const int64_t longest = (p.stored + kBlockKeys - 1) / kBlockKeys + 1;
  const int64_t wanted = share < kMinPieceBlocks ? kMinPieceBlocks : share;
  // Uncut, where there is no room for pieces.
  const auto most = static_cast<int32_t>(limits.split_pieces == 0 || wanted > longest ? longest : wanted);

  for (int i = lane; i < kBuckets; i += kWave) memory.places[i] = 0;
  wave_barrier();
  for_tiles(p, memory, [&](const Tile& tile, bool exists) {
    const Cut cut = cut_of(blocks_of(tile, p.causal), most);
    if (exists) atomicAdd(&memory.places[cut.bucket], cut.count);
  });
  wave_barrier();
  int32_t before = 0;
#pragma unroll 1
  for (int i = 0; i < kBuckets; i += kWave) {
    const int32_t count = memory.places[i + lane], end = before + sum_up_to_lane(count);
    memory.places[i + lane] = end - count;
    before = lane_value(end, kWave - 1);
  }
  wave_barrier();

  int32_t partials = 0, split_tiles = 0;
  for_tiles(p, memory, [&](const Tile& tile, bool exists) {
    const int32_t blocks = blocks_of(tile, p.causal);
    const Cut cut = cut_of(blocks, most);
    const bool split = exists && cut.count > 1;
    const int32_t partials_end = partials + sum_up_to_lane(split ? cut.count : 0);
    const int32_t splits_end = split_tiles + sum_up_to_lane(split ? 1 : 0);
    const int32_t first_partial = partials_end - cut.count;
    partials = lane_value(partials_end, kWave - 1);
    split_tiles = lane_value(splits_end, kWave - 1);
    if (!exists) return;
    // Lengths that descend may give more than there can be. What has no room then is left out.
    const bool fits = first_partial >= 0 && partials_end <= limits.split_pieces && splits_end <= limits.split_tiles;
    if (split && fits) scratch.split_tiles[splits_end - 1] = {tile.first_query, tile.rows, first_partial, cut.count};
    const int32_t place = atomicAdd(&memory.places[cut.bucket], cut.count);
#pragma unroll 1
    for (int32_t i = 0; i < cut.count; ++i) {
      if (static_cast<uint32_t>(place + i) >= limits.pieces) break;
      const int32_t first = i * cut.blocks, end = first + cut.blocks < blocks ? first + cut.blocks : blocks;
      const int32_t rows = split && !fits ? 0 : tile.rows;
      scratch.pieces[place + i] = {tile.first_query, rows,  tile.kv_begin, tile.kv_end,
                                   tile.diagonal,    first, end,           split ? first_partial + i : -1};
    }
  });
  if (lane == 0) {
    *scratch.plan = {before < limits.pieces ? before : static_cast<int32_t>(limits.pieces),
                     split_tiles < limits.split_tiles ? split_tiles : static_cast<int32_t>(limits.split_tiles),
                     {}};
  }
}

}  // namespace
}  // namespace mla::gfx9_prefill::fp8

MLA_KERNEL __launch_bounds__(64) mla_prefill_fp8_plan(mla::PrefillParams p) {
  __shared__ mla::gfx9_prefill::fp8::Memory memory;
  mla::gfx9_prefill::fp8::plan(p, memory);
}
