// Which queries a workgroup has, and which keys they see.
#pragma once

#include "kernels/prefill/gfx9/shape.h"
#include "kernels/rocm/lds.h"

namespace mla::gfx9_prefill {

template <class T>
using Lds = MLA_LDS T*;

// Queries of one request and head, and the keys that they see. Positions are those in the arrays; all are uniform.
struct Tile {
  int32_t rows;  // queries; 0: there is no tile
  int32_t first_query;
  int32_t head;
  int32_t kv_begin, kv_end;
  int32_t diagonal;  // as in Request
};

// Keys of its request that the tile's row sees.
__device__ __forceinline__ int32_t visible_keys(const Tile& tile, bool causal, int32_t row) {
  const int32_t end = causal ? clamp(tile.diagonal + tile.first_query + row, tile.kv_begin, tile.kv_end) : tile.kv_end;
  return end - tile.kv_begin;
}

// The same number, of which the compiler computes nothing in front of a loop: what is seldom needed takes no registers.
__device__ __forceinline__ int32_t in_place(int32_t value) {
  asm volatile("" : "+v"(value));
  return value;
}

// The least of all threads' values, by way of LDS, of which nobody else needs what is there.
template <int kWaves>
__device__ __forceinline__ int32_t least_of_workgroup(int32_t value, LdsBytes memory) {
  const auto values = reinterpret_cast<Lds<int32_t>>(memory);
  value = reduce_over_wave(value, Smallest{});
  lds_barrier();  // the memory's last readers have done
  if (lane_id() == 0) values[wave_id()] = value;
  lds_barrier();
#pragma unroll
  for (int wave = 0; wave < kWaves; ++wave) value = Smallest{}(value, values[wave]);
  return value;
}

// Over the lanes up to this one.
__device__ __forceinline__ int32_t sum_up_to_lane(int32_t value) {
#pragma unroll
  for (int distance = 1; distance < kWave; distance *= 2) {
    const int32_t other = shuffle_up(value, distance);
    value += lane_id() >= distance ? other : 0;
  }
  return value;
}

// A head's tile number `index`, by a wave. A request's last tiles come first, since later queries see more keys.
template <int kTileRows>
__device__ __forceinline__ Tile find_tile(const PrefillParams& p, int32_t index) {
  Tile tile{};
#pragma unroll 1
  for (int32_t first = 0; first < p.batch + 2; first += kWave) {
    Request r{};
    if (first + lane_id() < p.batch + 2) r = read_request<kTileRows>(p, first + lane_id());
    const int32_t end = sum_up_to_lane(r.tiles);
    const uint64_t owner = ballot(end > index && end - r.tiles <= index);
    if (owner != 0) {
      const int lane = __builtin_ctzll(owner);
      const auto owners = [lane](int32_t value) { return __builtin_amdgcn_readlane(value, lane); };
      tile.first_query = owners(r.q_begin + (end - 1 - index) * kTileRows);
      tile.rows = clamp(owners(r.q_end) - tile.first_query, 0, kTileRows);
      tile.kv_begin = owners(r.kv_begin);
      tile.kv_end = owners(r.kv_end);
      tile.diagonal = owners(r.diagonal);
      break;
    }
    index -= __builtin_amdgcn_readlane(end, kWave - 1);
    if (index < 0) break;
  }
  return tile;
}

// The key mask of a block as bits; past the array's end they are clear.
template <int kKeys>
struct KeyBits {
  uint32_t words[kKeys / 32];

  __device__ __forceinline__ bool operator[](int key) const {
    uint32_t word = words[0];
#pragma unroll
    for (int i = 1; i < kKeys / 32; ++i) word = key / 32 == i ? words[i] : word;
    return word >> key % 32 & 1;
  }
};

// From the key at position `first_key` on; all set where there is no mask.
template <int kKeys>
__device__ __forceinline__ KeyBits<kKeys> read_key_bits(const PrefillParams& p, int32_t first_key) {
  KeyBits<kKeys> bits;
#pragma unroll
  for (uint32_t& word : bits.words) word = 0xFFFFFFFF;
  if (p.key_mask == nullptr) return bits;
  const int32_t word = first_key / 32, shift = first_key % 32, end = (static_cast<int32_t>(p.stored) + 31) / 32;
  uint32_t words[kKeys / 32 + 1];
#pragma unroll
  for (int i = 0; i < kKeys / 32 + 1; ++i) words[i] = word + i < end ? p.key_mask[word + i] : 0;
#pragma unroll
  for (int i = 0; i < kKeys / 32; ++i) {
    bits.words[i] = static_cast<uint32_t>((uint64_t{words[i + 1]} << 32 | words[i]) >> shift);
  }
  return bits;
}

// The first `count` of 32 bits.
__device__ __forceinline__ uint32_t first_bits(int32_t count) {
  return count >= 32 ? 0xFFFFFFFF : count <= 0 ? 0 : (1u << count) - 1;
}

}  // namespace mla::gfx9_prefill
