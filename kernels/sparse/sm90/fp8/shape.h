// The geometry of the Hopper sparse kernels for fp8 caches: dense decode's warps (kernels/decode/sm90/fp8) over tokens
// that lie in shared memory as they are cached, one after the other. docs/sparse.md explains it.
#pragma once

#include "kernels/decode/sm90/fp8/shape.h"
#include "kernels/decode/sm90/fp8/wide/shape.h"
#include "kernels/sparse/sm90/chosen.cuh"
#include "kernels/sparse/sm90/fp8/layouts.h"
#include "kernels/sparse/sm90/fp8/scales.cuh"

namespace mla::sparse_sm90::fp8 {

namespace dense = sm90::fp8;

// The warpgroup that loads: three warps bring tokens, the last one knows the items.
constexpr int kTokenWarps = 3;
constexpr int kListBarrier = 9;  // of the token warps: the next block's slots are in the ring

// Dense decode's roles and registers; what differs is the shared memory. Where tokens have scales, so have weights:
// there is one set for each.
template <class CacheLayout, int kTileRows>
struct Shape : dense::Shape<kTileRows> {
  using Layout = CacheLayout;
  using Dense = dense::Shape<kTileRows>;
  using RopeElement = typename Layout::RopeElement;
  static constexpr int kSlotBytes = kBlockTokens * Layout::kStride;
  static constexpr bool kPreparesScales = false;
  static constexpr int kWeightSets = Layout::kScales > 0 ? Layout::kScales : 1;
  static constexpr int kWeightSetBytes = Dense::kWeightBytes;
  static constexpr int kWeightBytes = kWeightSets * kWeightSetBytes;  // of a block
  static_assert(kSlotBytes % 1024 == 0, "what lies behind the slots is swizzled");

  template <int kCount>
  static constexpr size_t bytes_with() {
    return size_t{kCount} * kSlotBytes + Dense::kQueryBytes + 2 * kWeightBytes +
           sizeof(dense::ControlOf<kTileRows, Dense::kScoreGroups, kCount>) + sizeof(ChosenRing);
  }
  static constexpr int kSlots = bytes_with<4>() <= dense::kSharedLimit   ? 4
                                : bytes_with<3>() <= dense::kSharedLimit ? 3
                                                                         : 2;
  static constexpr size_t kSharedBytes = bytes_with<kSlots>();
  static_assert(kSharedBytes <= dense::kSharedLimit);

  static constexpr int kQueryOffset = kSlots * kSlotBytes;
  static constexpr int kWeightOffset = kQueryOffset + Dense::kQueryBytes;
  static constexpr int kControlOffset = kWeightOffset + 2 * kWeightBytes;
  static constexpr int kChosenOffset =
      kControlOffset + static_cast<int>(sizeof(dense::ControlOf<kTileRows, Dense::kScoreGroups, kSlots>));
};

template <int kTileRows>
constexpr bool is_wide = kTileRows == dense::wide::Shape::kRows;

// The same for wide tiles, of 64 heads. There is one set of weights, and scales are multiplied into the values.
template <class CacheLayout>
struct WideShape : dense::wide::Shape {
  using Layout = CacheLayout;
  using RopeElement = typename Layout::RopeElement;
  static constexpr bool kPreparesScales = Layout::kScales > 0;
  static constexpr int kSlots = kPreparesScales ? 6 : dense::wide::Shape::kSlots;
  static_assert(kSlots >= 3 * kBlockSlots);
  static constexpr int kSlotBytes = kSlotTokens * Layout::kStride + (kPreparesScales ? SlotScales::kBytes : 0);
  static_assert(kSlotTokens == SlotScales::kTokens);
  // Loads take more registers here than in dense decode, and so the attending warps have fewer.
  static constexpr int kAttendRegisters = 232, kLoadRegisters = 40;
  static constexpr int kStepsAhead = 1;

  static constexpr int kSwizzleBytes = 1024;
  static constexpr int kQueryOffset = (kSlots * kSlotBytes + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes;
  static constexpr int kWeightOffset = kQueryOffset + kQueryBytes;
  static constexpr int kControlOffset = kWeightOffset + 2 * kWeightBytes;
  static constexpr int kChosenOffset =
      kControlOffset + static_cast<int>(sizeof(dense::ControlOf<kRows, kScoreGroups, kSlots>));
  static constexpr int kScaledOffset = kChosenOffset + static_cast<int>(sizeof(ChosenRing));  // barriers
  static constexpr size_t kSharedBytes = kScaledOffset + (kPreparesScales ? kSlots * sizeof(uint64_t) : 0);
  static_assert(kSharedBytes <= dense::kSharedLimit);
};

}  // namespace mla::sparse_sm90::fp8
