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

// Tiles of up to 48 rows: a slot is three chunks of 64 columns, one for each key warp.
template <int kTileRows>
struct Narrow {
  using Shape = sm90::Shape<kTileRows>;
  using Control = sm90::Control<Shape>;
  static constexpr int kFirstLoadWarp = Shape::kKeyWarp;
  static constexpr int kThreads = Shape::kThreads;
  static constexpr int kSlots = Shape::kSlots, kBlockSlots = sm90::kBlockSlots, kSlotBytes = sm90::kSlotBytes;

  // What the consumers ask of a block besides its tokens, once for all: there is no page that could be missing.
  static __device__ __forceinline__ void announce(Control& control) {
    for (uint32_t& pages : control.valid_pages) pages = 1;
  }

  // A key warp's share of the block's i-th slot: a chunk of all tokens, of which eight lanes have 16 neighbours.
  static __device__ __forceinline__ void copy(const unsigned char* layer, const int32_t* slots, int i, uint32_t target,
                                              int warp) {
    constexpr int kTokens = kBlockTokens * kLanes / 32;
    const int first = threadIdx.x % 32 / kLanes * kTokens;
    const int chunk = i * sm90::kSlotChunks + warp;
    layer += chunk * sm90::kLineBytes + threadIdx.x % kLanes * 16;
    target += warp * sm90::kChunkBytes + first * sm90::kLineBytes;
#pragma unroll
    for (int token = 0; token < kTokens; token += kTokensAtOnce) {
      for_tokens(layer, slots + first + token, [&](int i, const unsigned char* source, bool valid) {
        const int line = (token + i) % 8;
        ptx::cp_async_16(target + (token + i - line) * sm90::kLineBytes + swizzled_unit(line), source, valid);
      });
    }
  }
};

// Tiles of 64 rows: a slot is two slices, of eight tokens with all of their columns.
struct Wide {
  using Shape = sm90::wide::Shape;
  using Control = sm90::wide::Control;
  static constexpr int kFirstLoadWarp = sm90::wide::kKeyWarp;
  static constexpr int kThreads = sm90::wide::kThreads;
  static constexpr int kSlots = sm90::wide::kSlots, kBlockSlots = sm90::wide::kBlockSlots;
  static constexpr int kSlotBytes = sm90::wide::kSlotBytes;

  static __device__ __forceinline__ void announce(Control& control) {
    for (uint32_t& slices : control.valid_slices) slices = sm90::wide::kAllSlices;
  }

  static __device__ __forceinline__ void copy(const unsigned char* layer, const int32_t* slots, int i, uint32_t target,
                                              int warp) {
    const int first = threadIdx.x % 32 / kLanes * kTokensAtOnce;
    layer += warp * sm90::kLineBytes + threadIdx.x % kLanes * 16;
    target += warp * sm90::wide::kSliceChunkBytes + first / 8 * sm90::wide::kSliceBytes;
    for_tokens(layer, slots + i * sm90::wide::kSlotTokens + first, [&](int i, const unsigned char* source, bool valid) {
      const uint32_t line = target + swizzled_unit(first % 8 + i);
#pragma unroll
      for (int chunk = 0; chunk < sm90::kChunks; chunk += kKeyWarps) {
        ptx::cp_async_16(line + chunk * sm90::wide::kSliceChunkBytes, source + chunk * sm90::kLineBytes, valid);
      }
    });
  }
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
