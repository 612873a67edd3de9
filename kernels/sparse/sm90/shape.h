// The geometry of the Hopper sparse kernels for 16-bit caches: that of dense decode's, whose warps attend here too, and
// how the loading warps share a slot of the ring. docs/sparse.md explains it.
#pragma once

#include "kernels/decode/sm90/shape.h"
#include "kernels/decode/sm90/wide/shape.h"
#include "kernels/sparse/sm90/chosen.cuh"

namespace mla::sparse_sm90 {

// The warpgroup that loads: three warps bring tokens, one the queries and the items.
constexpr int kKeyWarps = 3;
constexpr int kKeyThreads = 32 * kKeyWarps;
constexpr int kQueryWarp = kKeyWarps;    // counted in the warpgroup
constexpr int kListBarrier = 8;          // of the key warps: the next block's slots are in the ring
constexpr int kTokenBytes = kWidth * 2;  // of the cache
constexpr int kLanes = 8;                // that copy a line of 128 bytes, 16 each
constexpr int kTokensAtOnce = 4;         // of a lane: whose slots it reads at once
static_assert(sm90::kSlotChunks == kKeyWarps && sm90::kChunks % kKeyWarps == 0, "a warp has every third chunk");

// This lane's 16 bytes of line `line` of eight, in the 128-byte swizzle.
__device__ __forceinline__ uint32_t swizzled_unit(int line) {
  return line * sm90::kLineBytes + ((threadIdx.x % kLanes ^ line) << 4);
}

// Of four tokens in turn, whose slots are `slots`: copy(its number, where its row begins, whether it is a token).
template <class Copy>
__device__ __forceinline__ void for_tokens(const unsigned char* rows, const int32_t* slots, Copy copy) {
  const int4 four = *reinterpret_cast<const int4*>(slots);
  const int32_t each[kTokensAtOnce] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int i = 0; i < kTokensAtOnce; ++i) copy(i, rows + int64_t{max_of(each[i], 0)} * kTokenBytes, each[i] >= 0);
}

// A chunk of all of a block's tokens, of which eight lanes have 16 neighbours.
__device__ __forceinline__ void copy_chunk(const unsigned char* layer, const int32_t* slots, int chunk,
                                           uint32_t target) {
  constexpr int kTokens = kBlockTokens * kLanes / 32;
  const int first = threadIdx.x % 32 / kLanes * kTokens;
  layer += chunk * sm90::kLineBytes + threadIdx.x % kLanes * 16;
  target += first * sm90::kLineBytes;
#pragma unroll
  for (int token = 0; token < kTokens; token += kTokensAtOnce) {
    for_tokens(layer, slots + first + token, [&](int i, const unsigned char* source, bool valid) {
      const int line = (token + i) % 8;
      ptx::cp_async_16(target + (token + i - line) * sm90::kLineBytes + swizzled_unit(line), source, valid);
    });
  }
}

// Tiles of up to 48 rows: a slot is three chunks of 64 columns, one for each key warp.
template <int kTileRows>
struct Narrow {
  using Shape = sm90::Shape<kTileRows>;
  using Control = sm90::Control<Shape>;
  static constexpr int kFirstLoadWarp = Shape::kKeyWarp;
  static constexpr int kThreads = Shape::kThreads;
  static constexpr int kSlots = Shape::kSlots, kSlotBytes = sm90::kSlotBytes;
  static constexpr int kFullArrivals = kKeyThreads;

  // What the consumers ask of a block besides its tokens, once for all: there is no page that could be missing.
  static __device__ __forceinline__ void announce(Control& control) {
    for (uint32_t& pages : control.valid_pages) pages = 1;
  }

  // Where key warp `warp` puts its chunks in turn.
  struct Position {
    sm90::Ring<Shape> ring;

    __device__ __forceinline__ uint32_t slot(int /*turn*/, int /*warp*/) const { return ring.slot; }
    __device__ __forceinline__ uint32_t parity() const { return ring.parity; }
    static __device__ __forceinline__ int chunk(int turn, int warp) { return turn * kKeyWarps + warp; }
    static __device__ __forceinline__ uint32_t offset(int warp) { return warp * sm90::kChunkBytes; }
    __device__ __forceinline__ void advance() { ring.advance(); }
    __device__ __forceinline__ void next_block() {}
  };
};

// Tiles of 64 rows: a slot is a chunk.
struct Wide {
  using Shape = sm90::wide::Shape;
  using Control = sm90::wide::Control;
  static constexpr int kFirstLoadWarp = sm90::wide::kKeyWarp;
  static constexpr int kThreads = sm90::wide::kThreads;
  static constexpr int kSlots = sm90::wide::kSlots, kSlotBytes = sm90::kChunkBytes;
  static constexpr int kFullArrivals = 32;

  static __device__ __forceinline__ void announce(Control& control) {
    for (uint32_t& slices : control.valid_slices) slices = sm90::wide::kAllSlices;
  }

  struct Position {
    uint32_t block = 0;

    __device__ __forceinline__ uint32_t slot(int turn, int warp) const {
      return sm90::wide::Place(block).slot(chunk(turn, warp));
    }
    __device__ __forceinline__ uint32_t parity() const { return sm90::wide::Place(block).parity; }
    static __device__ __forceinline__ int chunk(int turn, int warp) {
      return sm90::wide::chunk_in_order(turn * kKeyWarps + warp);
    }
    static __device__ __forceinline__ uint32_t offset(int /*warp*/) { return 0; }
    __device__ __forceinline__ void advance() {}
    __device__ __forceinline__ void next_block() { ++block; }
  };
};

// In shared memory: the ring of slots, the queries, what the consumers share, and the chosen slots.
template <class Layout>
struct Memory {
  static constexpr int kQueryOffset = Layout::kSlots * Layout::kSlotBytes;
  static constexpr int kControlOffset = kQueryOffset + Layout::Shape::kQueryBytes;
  static constexpr int kChosenOffset = kControlOffset + static_cast<int>(sizeof(typename Layout::Control));
  static constexpr size_t kBytes = kChosenOffset + sizeof(ChosenRing);
  static_assert(kBytes <= 227 * 1024);
};

}  // namespace mla::sparse_sm90
