// Blocks of tokens on their way from the cache into LDS.
#pragma once

#include "kernels/decode/gfx9/formats.h"
#include "kernels/decode/gfx9/tokens.h"

namespace mla::gfx9 {

// What a wave does with its eight tokens once they are in LDS: those that do not exist become zeros, since a weight of
// 0 would make a NaN of a NaN, and the others learn which they are. `valid`: a byte for the block before, whose bits
// shared.valid still has, and one for this block.
constexpr uint32_t kAllValid = (1u << kWaveTokens) - 1;
template <class Shared>
__device__ __forceinline__ void finish_tokens(Shared& shared, Block& block, uint32_t valid, int wave, int lane) {
  if ((valid & 0xFFFF) == (kAllValid << kWaveTokens | kAllValid)) return;
  const uint32_t own = valid >> kWaveTokens & kAllValid;
#pragma unroll 1
  for (int t = 0; t < kWaveTokens; ++t) {
    if (own >> t & 1) continue;
    const int token = wave * kWaveTokens + t;
    *reinterpret_cast<U32x4*>(block.latent[token] + lane * 16) = U32x4{};
    if (lane < Block::kRopeStride / 16) *reinterpret_cast<U32x4*>(block.rope[token] + lane * 16) = U32x4{};
    if constexpr (Shared::kScaled) {
      if (lane < kScaleGroups) shared.key_scales[lane][token] = 0;
    }
  }
  if (lane == 0) shared.valid[wave] = static_cast<uint8_t>(own);
}

#if defined(__gfx950__)
// gfx950: copies that pass the registers, into a ring of blocks. While one block is worked on, the next are on their
// way, enough of them to hide the latency of memory.
template <class Source>
class CopiedBlocks {
 public:
  using Tokens = Source;
  static constexpr bool kScaled = false;
  static constexpr int kTokenBytes = PlainFormat::kTokenBytes;
  static constexpr int kStages = 4;
  static constexpr int kAhead = kStages - 1;
  static constexpr int kTokens = Block::kTokens;

  template <class Shared>
  __device__ __forceinline__ CopiedBlocks(Shared& shared, const Tokens& tokens, uint32_t first, int wave, int lane)
      : tokens_(tokens), wave_(wave) {
    if (lane == 0) shared.valid[wave] = kAllValid;
    const uint32_t own = first + wave * kWaveTokens;
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t begin = own + i * kTokens;
      if (first + i * kTokens >= tokens_.end) break;
      tokens_.with_rows(tokens_.look_up(begin), begin, false, [&](const auto& rows, uint32_t valid) {
        valid_ |= valid << (i + 1) * kWaveTokens;
        copy(rows, lane, shared, i * sizeof(Block));
      });
    }
    if (first + kAhead * kTokens < tokens_.end) lookup_ = tokens_.look_up(own + kAhead * kTokens);
  }

  // The block that begins with token `first`, once all waves' tokens are there. They have done with the one before.
  template <class Shared>
  __device__ __forceinline__ Block& next(Shared& shared, uint32_t first, int lane) {
    constexpr int kLoads = PlainFormat::kLoads;
    const uint32_t place = place_;
    Block& block = *reinterpret_cast<Block*>(reinterpret_cast<unsigned char*>(&shared.blocks[0]) + place);
    const uint32_t left = tokens_.end - first;  // not 0
    if (left <= 2 * kTokens) {
      if (left > kTokens)
        wait_for_loads<kLoads>();
      else
        wait_for_loads<0>();
    }
    wait_for_loads<2 * kLoads>();
    finish_tokens(shared, block, valid_, wave_, lane);
    lds_barrier();
    const uint32_t begin = first + kAhead * kTokens + wave_ * kWaveTokens;
    valid_ >>= kWaveTokens;
    if (left > kAhead * kTokens) {
      const bool whole = left >= (kAhead + 1) * kTokens;
      tokens_.with_rows(lookup_, begin, whole, [&](const auto& rows, uint32_t valid) {
        valid_ |= valid << kAhead * kWaveTokens;
        copy(rows, lane, shared, free_);
      });
    }
    if (left > (kAhead + 1) * kTokens) tokens_.look_further(lookup_, kTokens, begin + kTokens);
    free_ = place;
    place_ = place == kAhead * sizeof(Block) ? 0 : place + sizeof(Block);
    return block;
  }

 private:
  template <class Rows, class Shared>
  __device__ __forceinline__ void copy(const Rows& rows, int lane, Shared& shared, uint32_t place) const {
    const auto ring = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds_address(&shared.blocks[0])));
    const uint32_t block = uniform(static_cast<int32_t>(ring + place)), first = wave_ * kWaveTokens;
    constexpr uint32_t kStride = Block::kLatentStride, kLatentPlace = offsetof(Block, latent);
    constexpr uint32_t kRopePlace = offsetof(Block, rope);
#pragma unroll
    for (int half = 0; half < kWaveTokens; half += 4) {
      const unsigned char* sources[4];
      uint32_t offsets[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // The instruction adds i * kStride in the cache as well.
        constexpr uint32_t kBefore = Rows::kOneBase ? 0 : 3 * kStride;  // else an offset were negative
        sources[i] = rows.base(half + i, kBefore);
        offsets[i] = lane * 16 + rows.offset(half + i) + kBefore - i * kStride;
      }
      copy_four_to_lds<kStride>(sources, offsets, {block, kLatentPlace + (first + half) * kStride});
    }
    const LdsPlace rope{block, kRopePlace + first * Block::kRopeStride};
    if constexpr (Rows::kOneBase) {
      copy_to_lds(rows.base(0), rows.offset(lane / 8) + PlainFormat::rope_offset(lane), rope);
    } else {
      copy_to_lds(rows.of_lane(lane / 8) + PlainFormat::rope_offset(lane), rope);
    }
  }

  const Tokens tokens_;
  typename Tokens::Lookup lookup_{};        // of the block that is copied next
  uint32_t valid_ = kAllValid;              // of the block before, and of those on their way, a byte each
  uint32_t place_ = 0;                      // of the next block, in bytes from the ring's begin on
  uint32_t free_ = kAhead * sizeof(Block);  // of the one that everyone has done with
  const int wave_;
};
#endif

// Through registers, into one block: as soon as a register has been written to LDS, it takes its part of the next
// block.
template <class Format, class Source>
class LoadedBlocks {
 public:
  using Tokens = Source;
  static constexpr bool kScaled = Format::kScaled;
  static constexpr int kTokenBytes = Format::kTokenBytes;
  static constexpr int kStages = 1;
  static constexpr int kTokens = Block::kTokens;

  template <class Shared>
  __device__ __forceinline__ LoadedBlocks(Shared& shared, const Tokens& tokens, uint32_t first, int wave, int lane)
      : tokens_(tokens), wave_(wave) {
    if (lane == 0) shared.valid[wave] = kAllValid;
    const uint32_t own = first + wave * kWaveTokens;
    if (first < tokens_.end) {
      tokens_.with_rows(tokens_.look_up(own), own, false, [&](const auto& rows, uint32_t valid) {
        valid_ |= valid << kWaveTokens;
#pragma unroll
        for (int i = 0; i < Format::kLoads; ++i) parts_[i] = Format::load(rows, lane, i);
      });
    }
    if (first + kTokens < tokens_.end) lookup_ = tokens_.look_up(own + kTokens);
  }

  template <class Shared>
  __device__ __forceinline__ Block& next(Shared& shared, uint32_t first, int lane) {
    Block& block = shared.blocks[0];
    const uint32_t begin = first + kTokens + wave_ * kWaveTokens;
    lds_barrier();                              // everyone has done with the block before
    const uint32_t left = tokens_.end - first;  // not 0
    Format::prepare(parts_);
#pragma unroll
    for (int i = 0; i < Format::kLoads; ++i) Format::store(shared, block, wave_ * kWaveTokens, i, lane, parts_[i]);
    if (left > kTokens) {
      tokens_.with_rows(lookup_, begin, left >= 2 * kTokens, [&](const auto& rows, uint32_t valid) {
        valid_ |= valid << 2 * kWaveTokens;
#pragma unroll
        for (int i = 0; i < Format::kLoads; ++i) parts_[i] = Format::load(rows, lane, i);
      });
    }
    if (left > 2 * kTokens) tokens_.look_further(lookup_, kTokens, begin + kTokens);
    finish_tokens(shared, block, valid_, wave_, lane);
    valid_ >>= kWaveTokens;
    lds_barrier();
    return block;
  }

 private:
  const Tokens tokens_;
  typename Tokens::Lookup lookup_{};
  U32x4 parts_[Format::kLoads];
  uint32_t valid_ = kAllValid;  // of the block before, and of the next, a byte each
  const int wave_;
};

// The way of a format's blocks, whose tokens `Source<bytes a token>` finds.
template <class Format, template <int> class Source>
struct BlocksOf {
  using Type = LoadedBlocks<Format, Source<Format::kTokenBytes>>;
};
#if defined(__gfx950__)
template <template <int> class Source>
struct BlocksOf<PlainFormat, Source> {
  using Type = CopiedBlocks<Source<PlainFormat::kTokenBytes>>;
};
#endif

}  // namespace mla::gfx9
