// The geometry of the Hopper sparse kernels for 16-bit caches: that of dense decode's, whose warps attend here too, and
// how the loading warps share a slot of the ring. docs/sparse.md explains it.
#pragma once

#include <type_traits>

#include "kernels/decode/sm90/shape.h"
#include "kernels/decode/sm90/wide/shape.h"
#include "kernels/sparse/sm90/chosen.cuh"

namespace mla::sparse_sm90 {

// Of the warpgroup that loads, the last warp brings the queries and the items, and those in front of it the tokens.
constexpr int kKeyWarps = 3, kQueryWarp = kKeyWarps;
constexpr int kListBarrier = 7;          // of the key warps: the next block's slots are in the ring
constexpr int kTokenBytes = kWidth * 2;  // of the cache
constexpr int kLanes = 8;                // that copy a line of 128 bytes, 16 each
static_assert(sm90::kChunkColumns * 2 == kLanes * 16);

// Where the tokens of a block lie that this lane copies a part of, in every chunk: of each four neighbours one, so that
// a row's address is made once for all of its chunks.
class TokenRows {
 public:
  // `warp`: of the key warps. The first has fewer fours than the others, since it writes down the slots.
  __device__ __forceinline__ explicit TokenRows(int warp)
      : fours_(warp == 0 ? kFirstWarpFours : kFours),
        first_((warp == 0 ? 0 : kFirstWarpFours + (warp - 1) * kFours) * kFour + threadIdx.x % 32 / kLanes),
        line_(first_ * sm90::kLineBytes + ((threadIdx.x % kLanes ^ first_ % 8) << 4)) {}

  // `slots`: of the block; -1 behind its last token, which then arrives as zeros.
  __device__ __forceinline__ void find(const int32_t* slots) {
    valid_ = 0;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int32_t slot = i < fours_ ? slots[first_ + i * kFour] : -1;
      rows_[i] = static_cast<uint32_t>(max_of(slot, 0)) * sm90::kChunks;
      valid_ |= static_cast<uint32_t>(slot >= 0) << i;
    }
  }

  // Neighbouring chunks of the block, from the cache's layer to shared memory, in the 128-byte swizzle. Row by row:
  // what is neighbours in memory is asked for together.
  template <int kCopied>
  __device__ __forceinline__ void copy(const unsigned char* layer, int chunk, uint32_t target) const {
    // A sum by itself, so that each row's address is one instruction more.
    layer = ptx::opaque(layer + chunk * sm90::kLineBytes + threadIdx.x % kLanes * 16);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      if (i >= fours_) break;
      // A line's place in its eight changes by bit 2 alone, or not at all.
      static_assert(kFour == 4);
      const uint32_t line = (line_ ^ (i * kFour % 8) << 4) + i * kFour * sm90::kLineBytes;
      const unsigned char* const row = layer + uint64_t{rows_[i]} * sm90::kLineBytes;
#pragma unroll
      for (int c = 0; c < kCopied; ++c) {
        ptx::cp_async_16(target + line + c * sm90::kChunkBytes, row + c * sm90::kLineBytes, valid_ >> i & 1);
      }
    }
  }

 private:
  static constexpr int kFour = 32 / kLanes, kAllFours = kBlockTokens / kFour;
  static constexpr int kFirstWarpFours = kAllFours / kKeyWarps - 1;
  static constexpr int kFours = (kAllFours - kFirstWarpFours) / (kKeyWarps - 1);
  static_assert(kFirstWarpFours + kFours * (kKeyWarps - 1) == kAllFours);

  int fours_;
  uint32_t first_;         // token
  uint32_t line_;          // this lane's 16 bytes of it, in a chunk
  uint32_t rows_[kFours];  // in lines
  uint32_t valid_ = 0;
};

// What the key warps ask for together: so many neighbouring chunks, whose rows lie in one piece in the cache.
template <int kCount>
using Chunks = std::integral_constant<int, kCount>;

// Tiles of up to 48 rows: a slot is three chunks of 64 columns.
template <int kTileRows>
struct Narrow {
  using Shape = sm90::Shape<kTileRows>;
  using Control = sm90::Control<Shape>;
  static constexpr int kFirstLoadWarp = Shape::kKeyWarp;
  static constexpr int kThreads = Shape::kThreads;
  static constexpr int kSlots = Shape::kSlots, kSlotChunks = sm90::kSlotChunks;

  // What the consumers ask of a block besides its tokens, once for all: there is no page that could be missing.
  static __device__ __forceinline__ void announce(Control& control) {
    for (uint32_t& pages : control.valid_pages) pages = 1;
  }

  template <class Bring>
  static __device__ __forceinline__ void for_steps(const Bring& bring) {
#pragma unroll 1
    for (int chunk = 0; chunk < sm90::kChunks; chunk += kSlotChunks) bring(Chunks<kSlotChunks>{}, chunk);
  }

  // The slot to be filled next.
  struct Position {
    sm90::Ring<Shape> ring;

    __device__ __forceinline__ uint32_t slot(int /*chunk*/) const { return ring.slot; }
    __device__ __forceinline__ uint32_t parity() const { return ring.parity; }
    __device__ __forceinline__ void end_step() { ring.advance(); }
    __device__ __forceinline__ void end_block() {}
  };
};

// Tiles of 64 rows: a slot is a chunk.
struct Wide {
  using Shape = sm90::wide::Shape;
  using Control = sm90::wide::Control;
  static constexpr int kFirstLoadWarp = sm90::wide::kKeyWarp;
  static constexpr int kThreads = sm90::wide::kThreads;
  static constexpr int kSlots = sm90::wide::kSlots, kSlotChunks = 1;
  static constexpr int kAttendRegisters = sm90::wide::kAttendRegisters - 8;  // loads take more here
  static constexpr int kLoadRegisters = sm90::wide::kLoadRegisters + 16;

  static __device__ __forceinline__ void announce(Control& control) {
    for (uint32_t& slices : control.valid_slices) slices = sm90::wide::kAllSlices;
  }

  // As neighbours come, for the warps that attend.
  __host__ __device__ static constexpr uint32_t chunk_in_order(uint32_t i) { return i; }

  template <class Bring>
  static __device__ __forceinline__ void for_steps(const Bring& bring) {
    bring(Chunks<4>{}, 0);
    bring(Chunks<5>{}, 4);
  }

  struct Position {
    uint32_t block = 0;

    __device__ __forceinline__ uint32_t slot(int chunk) const { return sm90::wide::Place(block).slot(chunk); }
    __device__ __forceinline__ uint32_t parity() const { return sm90::wide::Place(block).parity; }
    __device__ __forceinline__ void end_step() {}
    __device__ __forceinline__ void end_block() { ++block; }
  };
};

// In shared memory: the ring of slots, the queries, what the consumers share, and the chosen slots.
template <class Layout>
struct Memory {
  static constexpr int kQueryOffset = Layout::kSlots * Layout::kSlotChunks * sm90::kChunkBytes;
  static constexpr int kControlOffset = kQueryOffset + Layout::Shape::kQueryBytes;
  static constexpr int kChosenOffset = kControlOffset + static_cast<int>(sizeof(typename Layout::Control));
  static constexpr size_t kBytes = kChosenOffset + sizeof(ChosenRing);
  static_assert(kBytes <= 227 * 1024);
};

}  // namespace mla::sparse_sm90
