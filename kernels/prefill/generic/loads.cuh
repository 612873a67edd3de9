// A tile and its operands: which one a CTA has, its queries in registers, blocks of keys and values in shared memory.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/prefill/generic/shape.h"
#include "kernels/prefill/parts.h"

namespace mla::generic_prefill {

// A head's tile number `index`, by a warp. A request's last tiles come first, since later queries see more keys.
__device__ __forceinline__ void find_tile(const PrefillParams& p, int32_t index, Tile& target) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) target.rows = 0;
  __syncwarp();
  for (int32_t first = 0; first < p.batch + 2; first += 32) {
    Request r{};
    if (first + lane < p.batch + 2) r = read_request<kTileQueries>(p, first + lane);
    int32_t before = r.tiles;  // and this request's own
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t other = __shfl_up_sync(0xFFFFFFFF, before, distance);
      if (lane >= distance) before += other;
    }
    if (before > index && before - r.tiles <= index) {
      target.first_query = r.q_begin + (before - 1 - index) * kTileQueries;
      target.rows = clamp(r.q_end - target.first_query, 0, kTileQueries);
      target.kv_begin = r.kv_begin;
      target.kv_end = r.kv_end;
      target.diagonal = r.diagonal;
    }
    index -= __shfl_sync(0xFFFFFFFF, before, 31);
    if (index < 0) break;
  }
  __syncwarp();
}

constexpr int kQuerySteps = kHeadDim / 16;

// As A fragments of a warp's 16 rows.
using Queries = uint32_t[kQuerySteps][4];

// `row`: of the tile, this lane's upper one. Rows that do not exist are 0.
template <class Element>
__device__ __forceinline__ void load_queries(const PrefillParams& p, const Tile& tile, int row, Queries& queries) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool exists = row + 8 * half < tile.rows;
    const int64_t query = tile.first_query + (exists ? row + 8 * half : 0);
    const Element* source =
        static_cast<const Element*>(p.q) + (query * p.heads + tile.head) * kHeadDim + threadIdx.x % 4 * 2;
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      queries[step][half] = exists ? *reinterpret_cast<const uint32_t*>(source + 16 * step) : 0;
      queries[step][half + 2] = exists ? *reinterpret_cast<const uint32_t*>(source + 16 * step + 8) : 0;
    }
  }
}

// Brings blocks of a tile's keys and values. `keys`: those behind are nobody's; they become zeros, and are not read.
class BlockLoader {
 public:
  __device__ __forceinline__ BlockLoader(const PrefillParams& p, const Tile& tile, int32_t keys)
      : keys_(keys), first_token_(threadIdx.x / kCopyLanes) {
    const int lane = threadIdx.x % kCopyLanes;
    const auto first_row = [&](const ArrayPart& part) {
      const int64_t row = part.offset + tile.kv_begin * part.token_stride + tile.head * part.head_stride;
      return static_cast<const unsigned char*>(part.data) + row * 2 + lane * 16;
    };
    const ArrayPart nope = nope_part(p), rope = rope_part(p), value = value_part(p);
    nope_ = first_row(nope);
    rope_ = first_row(rope);
    value_ = first_row(value);
    nope_step_ = nope.token_stride * 2;
    rope_step_ = rope.token_stride * 2;
    value_step_ = value.token_stride * 2;
    chunk_ = (lane ^ (first_token_ % 8)) << 4;
  }

  // Started, not waited for.
  __device__ __forceinline__ void load(int32_t block, uint32_t stage) const {
    constexpr int kTokensAtOnce = kThreads / kCopyLanes;
    static_assert(kTokensAtOnce % 8 == 0, "a thread's tokens have the same place in the swizzle");
#pragma unroll
    for (int at = 0; at < kBlockKeys; at += kTokensAtOnce) {
      const int32_t token = block * kBlockKeys + at + first_token_;
      const bool valid = token < keys_;
      const int64_t source = valid ? token : 0;
      const uint32_t key_line = stage + (at + first_token_) * kKeyLine + chunk_;
      const uint32_t value_line = stage + kValuesAt + (at + first_token_) * kValueLine + chunk_;
#pragma unroll
      for (int i = 0; i < kNope * 2; i += kCopyLanes * 16) {
        ptx::cp_async_16(key_line + i, nope_ + source * nope_step_ + i, valid);
      }
      static_assert(kRope * 2 == kCopyLanes * 16);
      ptx::cp_async_16(key_line + kNope * 2, rope_ + source * rope_step_, valid);
#pragma unroll
      for (int i = 0; i < kValueLine; i += kCopyLanes * 16) {
        ptx::cp_async_16(value_line + i, value_ + source * value_step_ + i, valid);
      }
    }
  }

 private:
  const unsigned char* nope_;  // of the request's first token
  const unsigned char* rope_;
  const unsigned char* value_;
  int64_t nope_step_, rope_step_, value_step_;
  int32_t keys_;
  int first_token_;
  uint32_t chunk_;
};

// The key mask of a block as bits; past the array's end they are clear, and past the tile's keys they do not matter.
struct KeyBits {
  uint32_t words[kBlockKeys / 32];
  static_assert(kBlockKeys == 64);

  __device__ __forceinline__ bool operator[](int key) const { return (key < 32 ? words[0] : words[1]) >> key % 32 & 1; }
};

__device__ __forceinline__ KeyBits read_key_bits(const PrefillParams& p, int32_t first_key) {
  KeyBits bits{{0xFFFFFFFF, 0xFFFFFFFF}};
  if (p.key_mask == nullptr) return bits;
  const int32_t word = first_key / 32, shift = first_key % 32, end = (static_cast<int32_t>(p.stored) + 31) / 32;
  uint32_t words[kBlockKeys / 32 + 1];
#pragma unroll
  for (int i = 0; i < kBlockKeys / 32 + 1; ++i) words[i] = word + i < end ? p.key_mask[word + i] : 0;
#pragma unroll
  for (int i = 0; i < kBlockKeys / 32; ++i) {
    bits.words[i] = static_cast<uint32_t>((uint64_t{words[i + 1]} << 32 | words[i]) >> shift);
  }
  return bits;
}

// Values of a block that some row does not see: its weight of 0 would not silence them. Those of masked keys become
// zeros, of the others what is not finite; the first such key is noted, since the rows that see it are NaN.
template <class Element>
__device__ __forceinline__ void clear_values(unsigned char* values, int32_t first_key, const KeyBits& bits,
                                             int32_t& unusable) {
  constexpr int kLanes = kThreads / kBlockKeys;
  const int key = static_cast<int>(threadIdx.x) / kLanes;
  const bool used = bits[key];
#pragma unroll
  for (int i = 0; i < kValueLine / 16 / kLanes; ++i) {
    auto& vector = *reinterpret_cast<uint4*>(values + key * kValueLine + (threadIdx.x % kLanes + i * kLanes) * 16);
    const uint4 read = vector;
    uint4 cleared{};
    if (used) {
      cleared = {finite<Element>(read.x), finite<Element>(read.y), finite<Element>(read.z), finite<Element>(read.w)};
      if (cleared.x == read.x && cleared.y == read.y && cleared.z == read.z && cleared.w == read.w) continue;
      atomicMin(&unusable, first_key + key);
    }
    vector = cleared;
  }
}

}  // namespace mla::generic_prefill
