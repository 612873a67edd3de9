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
constexpr int kTokensAtOnce = 32 / kLanes;
static_assert(sm90::kSlotChunks == kKeyWarps && sm90::kChunks % kKeyWarps == 0, "a warp has every third chunk");

// This lane's 16 bytes of line `token` of eight, in the 128-byte swizzle.
__device__ __forceinline__ uint32_t swizzled_unit(int token) {
  const int unit = threadIdx.x % kLanes, line = token % 8;
  return line * sm90::kLineBytes + ((unit ^ line) << 4);
}

// Tiles of up to 48 rows: a slot is three chunks of 64 columns, one for each key warp.
template <int kTileRows>
struct Narrow {
  using Shape = sm90::Shape<kTileRows>;
  using Control = sm90::Control<Shape>;
  static constexpr int kFirstLoadWarp = Shape::kKeyWarp;
  static constexpr int kThreads = Shape::kThreads;
  static constexpr int kSlots = Shape::kSlots, kBlockSlots = sm90::kBlockSlots, kSlotBytes = sm90::kSlotBytes;

  // What the consumers ask of a block besides its tokens: there is no page that could be missing.
  static __device__ __forceinline__ void announce(Control& control, int slot) { control.valid_pages[slot] = 1; }

  // A key warp's share of the block's i-th slot.
  static __device__ __forceinline__ void copy(const unsigned char* layer, const int32_t* slots, int i, uint32_t target,
                                              int warp) {
    const int lane = threadIdx.x % 32, chunk = i * sm90::kSlotChunks + warp;
    const unsigned char* column = layer + chunk * sm90::kLineBytes + lane % kLanes * 16;
    target += warp * sm90::kChunkBytes;
#pragma unroll 4
    for (int first = 0; first < kBlockTokens; first += kTokensAtOnce) {
      const int token = first + lane / kLanes;
      const int32_t slot = slots[token];
      const bool valid = slot >= 0;
      ptx::cp_async_16(target + token / 8 * 8 * sm90::kLineBytes + swizzled_unit(token),
                       column + int64_t{valid ? slot : 0} * kTokenBytes, valid);
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

  static __device__ __forceinline__ void announce(Control& control, int slot) {
    control.valid_slices[slot / kBlockSlots] = sm90::wide::kAllSlices;
  }

  static __device__ __forceinline__ void copy(const unsigned char* layer, const int32_t* slots, int i, uint32_t target,
                                              int warp) {
    constexpr int kTokens = sm90::wide::kSlotTokens;
    const int lane = threadIdx.x % 32;
    layer += warp * sm90::kLineBytes + lane % kLanes * 16;
    target += warp * sm90::wide::kSliceChunkBytes;
#pragma unroll
    for (int first = 0; first < kTokens; first += kTokensAtOnce) {
      const int token = first + lane / kLanes;
      const int32_t slot = slots[i * kTokens + token];
      const bool valid = slot >= 0;
      const unsigned char* source = layer + int64_t{valid ? slot : 0} * kTokenBytes;
      const uint32_t line = target + token / 8 * sm90::wide::kSliceBytes + swizzled_unit(token);
#pragma unroll
      for (int chunk = 0; chunk < sm90::kChunks; chunk += kKeyWarps) {
        ptx::cp_async_16(line + chunk * sm90::wide::kSliceChunkBytes, source + chunk * sm90::kLineBytes, valid);
      }
    }
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
