// The geometry of the Hopper sparse kernels for 16-bit caches: that of dense decode's, whose warps attend here too, and
// how the loading warps share a slot of the ring. docs/sparse.md explains it.
#pragma once

#include <type_traits>

#include "kernels/decode/sm90/shape.h"
#include "kernels/decode/sm90/wide/shape.h"
#include "kernels/sparse/sm90/chosen.cuh"

namespace mla::sparse_sm90 {

// Of the warpgroup that loads, the last warp brings the queries and the items, and those in front of it the tokens.
constexpr int kQueryWarp = 3;
constexpr int kListBarrier = 7;          // of the key warps: the next block's slots are in the ring
constexpr int kTokenBytes = kWidth * 2;  // of the cache
constexpr int kLanes = 8;                // that copy a line of 128 bytes, 16 each
static_assert(sm90::kChunkColumns * 2 == kLanes * 16);

// Where the tokens of a block lie that this lane copies a part of, in every chunk: of each four neighbours one, and of
// these fours every kWarps-th, so that a row's address is made once for all of its chunks. kTokens: of the block that
// are this CTA's.
template <int kWarps, int kTokens>
class TokenRows {
 public:
  // `warp`: of the key warps. Where one has fewer fours than others it is the first, which reads the indices.
  __device__ __forceinline__ TokenRows(int warp, uint32_t first_token)
      : fours_((kTokens / kFour + warp) / kWarps),
        first_(first_token + (kWarps - 1 - warp) * kFour + threadIdx.x % 32 / kLanes),
        line_(first_ * sm90::kLineBytes + ((threadIdx.x % kLanes ^ first_ % 8) << 4)) {}

  // `slots`: of the block; -1 behind its last token, which then arrives as zeros.
  __device__ __forceinline__ void find(const int32_t* slots) {
    valid_ = 0;
#pragma unroll
    for (int i = 0; i < kMostFours; ++i) {
      const int32_t slot = i < fours_ ? slots[first_ + i * kStride] : -1;
      rows_[i] = static_cast<uint32_t>(max_of(slot, 0)) * sm90::kChunks;
      valid_ |= static_cast<uint32_t>(slot >= 0) << i;
    }
  }

  // A chunk of the block, from the cache's layer to shared memory, in the 128-byte swizzle.
  __device__ __forceinline__ void copy(const unsigned char* layer, int chunk, uint32_t target) const {
    // A sum by itself, so that each row's address is one instruction more.
    layer = ptx::opaque(layer + chunk * sm90::kLineBytes + threadIdx.x % kLanes * 16);
#pragma unroll
    for (int i = 0; i < kMostFours; ++i) {
      if (i >= fours_) break;
      // A line's place in its eight changes by bit 2 alone, or not at all.
      static_assert(kStride % 4 == 0);
      const uint32_t line = (line_ ^ (i * kStride % 8) << 4) + i * kStride * sm90::kLineBytes;
      ptx::cp_async_16(target + line, layer + uint64_t{rows_[i]} * sm90::kLineBytes, valid_ >> i & 1);
    }
  }

 private:
  static constexpr int kFour = 32 / kLanes, kStride = kFour * kWarps;
  static constexpr int kMostFours = (kTokens / kFour + kWarps - 1) / kWarps;

  int fours_;
  uint32_t first_;             // token
  uint32_t line_;              // this lane's 16 bytes of it, in a chunk
  uint32_t rows_[kMostFours];  // in lines
  uint32_t valid_ = 0;
};

// Tiles of up to 48 rows: a slot is three chunks of 64 columns.
template <int kTileRows>
struct Narrow {
  using Shape = sm90::Shape<kTileRows>;
  using Control = sm90::Control<Shape>;
  static constexpr int kFirstLoadWarp = Shape::kKeyWarp;
  static constexpr int kThreads = Shape::kThreads;
  static constexpr int kSlots = Shape::kSlots, kSlotChunks = sm90::kSlotChunks;
  static constexpr int kCtas = 1, kKeyWarps = 3;

  // What the consumers ask of a block besides its tokens, once for all: there is no page that could be missing.
  static __device__ __forceinline__ void announce(Control& control) {
    for (uint32_t& pages : control.valid_pages) pages = 1;
  }

  // By the key warps' threads, when their copies are there.
  static __device__ __forceinline__ uint32_t arrivals(Control& control) { return ptx::shared_address(control.full); }

  static __device__ __forceinline__ int first_chunk(int turn) { return turn * kSlotChunks; }

  // The slot to be filled next.
  struct Position {
    sm90::Ring<Shape> ring;

    __device__ __forceinline__ uint32_t slot(int /*chunk*/) const { return ring.slot; }
    __device__ __forceinline__ uint32_t parity() const { return ring.parity; }
    __device__ __forceinline__ void end_slot() { ring.advance(); }
    __device__ __forceinline__ void end_block() {}
  };
};

// What the warps of a pair of CTAs that load share besides.
struct PairControl : sm90::wide::Control {
  uint64_t half[sm90::wide::kSlots];   // this CTA's tokens of a chunk are there
  uint32_t last[sm90::wide::kBlocks];  // whether the block is its item's last one
};

// Tiles of 64 rows: a slot is a chunk. Where a query token has two of them, two CTAs of a cluster take one each, and
// each brings half of the tokens and hands them on to the other (forward.cuh).
template <int kClusterCtas>
struct Wide {
  using Shape = sm90::wide::Shape;
  using Control = std::conditional_t<kClusterCtas == 1, sm90::wide::Control, PairControl>;
  static constexpr int kFirstLoadWarp = sm90::wide::kKeyWarp;
  static constexpr int kThreads = sm90::wide::kThreads;
  static constexpr int kSlots = sm90::wide::kSlots, kSlotChunks = 1;
  static constexpr int kCtas = kClusterCtas, kKeyWarps = kCtas == 1 ? 3 : 2;  // the third of a pair forwards
  static constexpr int kAttendRegisters = sm90::wide::kAttendRegisters - 8;   // loads take more here
  static constexpr int kLoadRegisters = sm90::wide::kLoadRegisters + 16;
  static constexpr bool kScoresFirst = false;

  static __device__ __forceinline__ void announce(Control& control) {
    for (uint32_t& slices : control.valid_slices) slices = sm90::wide::kAllSlices;
  }

  static __device__ __forceinline__ uint32_t arrivals(Control& control) {
    if constexpr (kCtas == 1)
      return ptx::shared_address(control.full);
    else
      return ptx::shared_address(control.half);
  }

  static __device__ __forceinline__ int first_chunk(int turn) {
    return static_cast<int>(sm90::wide::chunk_in_order(turn));
  }

  struct Position {
    uint32_t block = 0;

    __device__ __forceinline__ uint32_t slot(int chunk) const { return sm90::wide::Place(block).slot(chunk); }
    __device__ __forceinline__ uint32_t parity() const { return sm90::wide::Place(block).parity; }
    __device__ __forceinline__ void end_slot() {}
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
