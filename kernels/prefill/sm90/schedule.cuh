// Which tiles a CTA has, found from the lengths on the device, without memory of its own.
//
// Heads come in groups, one group after the other. The tiles of a group are sorted by how many blocks of keys they
// need, the longest first, and dealt in rounds of one for each CTA; causal rounds run to and fro, so that who had the
// longest of one has the shortest of the next, and every other group begins the other way round. Among tiles of equal
// length those of a request follow one another, and the heads of a tile.
#pragma once

#include "kernels/prefill/request.cuh"
#include "kernels/prefill/sm90/format.cuh"

namespace mla::sm90_prefill {

// How many of a request's tiles need `blocks` blocks of keys or more: the last ones, since later queries see more.
template <class Format>
__device__ __forceinline__ int32_t tiles_of_at_least(const Request& r, bool causal, int32_t blocks) {
  if (blocks <= 0) return r.tiles;
  const int32_t beyond =
      Format::origin(r.kv_begin) + (blocks - 1) * kBlockKeys;  // a tile's last query has to see this key
  if (r.kv_end <= beyond) return 0;
  if (!causal) return r.tiles;
  const int32_t first_query = beyond - r.diagonal + 1;
  if (first_query >= r.q_end) return 0;
  if (first_query <= r.q_begin) return r.tiles;
  return r.tiles - (first_query - r.q_begin) / kTileQueries;
}

// Of all requests, by a whole warp.
template <class Format>
__device__ __forceinline__ int32_t count_tiles(const PrefillParams& p, int32_t blocks) {
  int32_t sum = 0;
#pragma unroll 1
  for (int32_t i = threadIdx.x % 32; i < p.batch + 2; i += 32) {
    sum += tiles_of_at_least<Format>(read_request<kTileQueries>(p, i), p.causal, blocks);
  }
  return __reduce_add_sync(0xFFFFFFFF, sum);  // in a uniform register, as then all that follows from it
}

// No tile needs more blocks, by a whole warp.
template <class Format>
__device__ __forceinline__ int32_t most_blocks(const PrefillParams& p) {
  int32_t most = 0;
#pragma unroll 1
  for (int32_t i = threadIdx.x % 32; i < p.batch + 2; i += 32) {
    const Request r = read_request<kTileQueries>(p, i);
    const int32_t blocks = (r.kv_end - Format::origin(r.kv_begin) + kBlockKeys - 1) / kBlockKeys;
    most = blocks > most ? blocks : most;
  }
  return __reduce_max_sync(0xFFFFFFFF, most);
}

// How many blocks a head's tile number `rank` has, in the order of their lengths, and which tiles have as many: by a
// whole warp. There are more than `rank`. Ranks rise while a group of heads lasts, so the last answer often holds, and
// else bounds this one.
template <class Format>
__device__ __forceinline__ void find_level(const PrefillParams& p, int32_t rank, Progress& progress) {
  if (rank >= progress.level_begin && rank < progress.level_end) return;
  const bool further = rank >= progress.level_end;
  int32_t blocks = 0, end = static_cast<int32_t>(progress.head_tiles);  // the tiles before `end` have so many or more
  int32_t too_many = further ? progress.level_blocks : progress.most_blocks + 1;
  int32_t begin = further ? progress.level_end : 0;  // those before `begin` have too many
#pragma unroll 1
  while (blocks + 1 < too_many) {
    const int32_t middle = (blocks + too_many) / 2;
    const int32_t count = count_tiles<Format>(p, middle);
    if (count > rank) {
      blocks = middle;
      end = count;
    } else {
      too_many = middle;
      begin = count;
    }
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    progress.level_blocks = blocks;
    progress.level_begin = begin;
    progress.level_end = end;
  }
  __syncwarp();
}

// A head's tile number `rank`, by a whole warp, to shared memory.
template <class Format>
__device__ __forceinline__ void find_tile(const PrefillParams& p, int32_t rank, Progress& progress, Tile& target) {
  find_level<Format>(p, rank, progress);
  const int32_t blocks = progress.level_blocks;
  rank -= progress.level_begin;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int32_t first = 0; first < p.batch + 2; first += 32) {
    int32_t count = 0;
    if (first + lane < p.batch + 2) {
      const Request r = read_request<kTileQueries>(p, first + lane);
      count = tiles_of_at_least<Format>(r, p.causal, blocks) - tiles_of_at_least<Format>(r, p.causal, blocks + 1);
    }
    int32_t before = count;  // and this request's own
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t other = __shfl_up_sync(0xFFFFFFFF, before, distance);
      if (lane >= distance) before += other;
    }
    if (before > rank && before - count <= rank) {
      target.kv_begin = first + lane;
      target.rows = rank - (before - count);
    }
    rank -= __reduce_add_sync(0xFFFFFFFF, count);
    if (rank < 0) break;
  }
  __syncwarp();
  // The request and the tile's number in it came through the target: registers are few.
  const Request r = read_request<kTileQueries>(p, target.kv_begin);
  const int32_t index = r.tiles - tiles_of_at_least<Format>(r, p.causal, blocks + 1) - 1 - target.rows;
  const int32_t first_query = r.q_begin + index * kTileQueries;
  __syncwarp();
  if (lane == 0) {
    target.first_query = first_query;
    target.rows = r.q_end - first_query < kTileQueries ? r.q_end - first_query : kTileQueries;
    target.kv_begin = r.kv_begin;
    target.kv_end = r.kv_end;
    target.blocks = blocks;
    target.diagonal = r.diagonal;
    target.whole_blocks = (visible_end(target, p.causal, first_query) - Format::origin(r.kv_begin)) / kBlockKeys;
  }
}

// By a whole warp. Lengths that descend may give more tiles than there can be; then some are left out.
template <class Format>
__device__ __forceinline__ void start_progress(const PrefillParams& p, const Schedule& schedule, Progress& progress) {
  const int32_t head_tiles =
      clamp(count_tiles<Format>(p, 0), 0, static_cast<int32_t>(most_head_tiles<kTileQueries>(p)));
  const uint32_t tiles = static_cast<uint32_t>(head_tiles) * schedule.group_heads;
  // Causal: a group begins with a round, since what a round lacks are then the shortest tiles.
  const uint32_t places = p.causal ? (tiles + gridDim.x - 1) / gridDim.x * gridDim.x : tiles;
  const int32_t most = most_blocks<Format>(p);
  if (threadIdx.x % 32 == 0)
    progress = {static_cast<uint32_t>(head_tiles), places, 0, 0, false, 0, 0, most, most + 1, 0, 0};
  __syncwarp();
}

// The CTA's next tile, to shared memory, by a whole warp. False: there is none.
template <class Format>
__device__ __forceinline__ bool next_tile(const PrefillParams& p, const Schedule& schedule, Progress& progress,
                                          Tile& target) {
#pragma unroll 1
  while (progress.group_places > 0) {
    const uint32_t round = progress.round, cta = blockIdx.x;
    uint32_t place = round * gridDim.x;
    const uint32_t group_rounds = progress.group_places / gridDim.x;
    const bool fro = p.causal && (round + place / progress.group_places * (group_rounds + 1)) % 2 == 1;
    place += fro ? gridDim.x - 1 - cta : cta;
    const uint32_t group = place / progress.group_places, index = place - group * progress.group_places;
    const uint32_t first_head = group * schedule.group_heads, all_heads = p.heads;
    if (first_head >= all_heads) return false;
    const uint32_t left = all_heads - first_head, group_heads = schedule.group_heads;
    const uint32_t heads = left < group_heads ? left : group_heads, rank = index / heads;
    const bool found = rank < progress.head_tiles;
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      progress.round = round + 1;
      target.round = static_cast<int32_t>(round);
      target.careful = round < static_cast<uint32_t>(schedule.fast_rounds) ? progress.retried : kAllWarps;
      target.head = static_cast<int32_t>(first_head + index - rank * heads);
    }
    __syncwarp();
    if (!found) continue;
    find_tile<Format>(p, static_cast<int32_t>(rank), progress, target);
    return true;
  }
  return false;
}

}  // namespace mla::sm90_prefill
