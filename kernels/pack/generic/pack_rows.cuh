// The kernel of pack_kv and pack_kv_fp8: the nope part of each head's key beside the rope part that all heads share;
// values apart where they change their type. Values in tiles are pack_tiles.cuh's.
//
// It waits for memory alone, as long as its instructions are few: a warp takes some (token, head) rows in their order,
// and no lane has a nope part where another has a rope part. The up-projection is read once, each rope key by
// neighbouring rows, so from L1.
#pragma once

#include "kernels/cuda/rows.cuh"
#include "kernels/pack/shape.h"

namespace mla {

template <class Input, class Output>
struct PackShape {
  static constexpr bool kValues = !std::is_same_v<Input, Output>;
  static constexpr int kCount = 16 / sizeof(Input);
  static constexpr int kRows = 4;  // of a warp
  static constexpr int kBlockRows = kPackThreads / kWarp * kRows;
};

template <class Input, class Rope, class Output>
__device__ __forceinline__ void pack_rows(const PackKvParams& p) {
  using Shape = PackShape<Input, Output>;
  constexpr bool kValues = Shape::kValues;
  constexpr int kCount = Shape::kCount, kRows = Shape::kRows;
  using UpSteps = RowSteps<(kValues ? kUpWidth : kNope) / kCount>;
  using RopeSteps = RowSteps<kRope / kCount>;
  constexpr int kUpSteps = kRows / UpSteps::kRowsAStep * UpSteps::kStepsARow,
                kRopeSteps = kRows / RopeSteps::kRowsAStep * RopeSteps::kStepsARow;
  const int lane = threadIdx.x % kWarp;
  const int64_t first_row = int64_t{blockIdx.x} * Shape::kBlockRows + threadIdx.x / kWarp * kRows;
  const int64_t rows_left = p.tokens * p.heads - first_row;
  if (rows_left <= 0) return;
  const int left = rows_left < kRows ? static_cast<int>(rows_left) : kRows;
  const int64_t first_token = first_row / p.heads;
  const auto heads = static_cast<uint32_t>(p.heads),
             first_head = static_cast<uint32_t>(first_row - first_token * p.heads);
  const auto is_value = [](int group) { return kValues && group >= kNope / kCount; };
  const auto is_there = [&](int step) { return UpSteps::row(step, lane) < left; };

  const Input* up = static_cast<const Input*>(p.kv_up) + first_row * kUpWidth;
  const Rope* k_pe = static_cast<const Rope*>(p.k_pe) + p.k_pe_offset + first_token * p.k_pe_stride;
  GroupBits<Input, kCount> read[kUpSteps];
#pragma unroll
  for (int step = 0; step < kUpSteps; ++step) {
    if (!is_there(step)) continue;
    read[step] =
        load_group<Input, kCount>(up + UpSteps::row(step, lane) * kUpWidth + UpSteps::group(step, lane) * kCount);
  }
  GroupBits<Rope, kCount> rope[kRopeSteps];
#pragma unroll
  for (int step = 0; step < kRopeSteps; ++step) {
    const int row = RopeSteps::row(step, lane);
    if (row >= left) continue;
    const int64_t token = (first_head + row) / heads;
    rope[step] = load_group<Rope, kCount>(k_pe + token * p.k_pe_stride + RopeSteps::group(step, lane) * kCount);
  }

  // Scales belong to fp8: where there is none, the compiler knows that bits are moved.
  const float k_scale = sizeof(Rope) == 1 ? scale_of(p.k_scale) : 1;
  const Divisor key_divide = kValues ? Divisor(scale_of(p.packed_k_scale)) : Divisor();
  const Divisor value_divide = kValues ? Divisor(scale_of(p.packed_v_scale)) : Divisor();
  Output* k = static_cast<Output*>(p.k) + first_row * kHeadDim;
  Output* v = static_cast<Output*>(p.v) + first_row * kNope - kNope;  // a value's columns come behind a key's
#pragma unroll
  for (int step = 0; step < kUpSteps; ++step) {
    if (!is_there(step)) continue;
    const int group = UpSteps::group(step, lane);
    const int width = is_value(group) ? kNope : kHeadDim;
    const Conversion conversion{1, is_value(group) ? value_divide : key_divide, p.saturate};
    store_group((is_value(group) ? v : k) + (UpSteps::row(step, lane) * width + group * kCount),
                convert_group<Output>(read[step], conversion));
  }
#pragma unroll
  for (int step = 0; step < kRopeSteps; ++step) {
    const int row = RopeSteps::row(step, lane);
    if (row >= left) continue;
    store_group(k + row * kHeadDim + kNope + RopeSteps::group(step, lane) * kCount,
                convert_group<Output>(rope[step], {k_scale, key_divide, p.saturate}));
  }
}

}  // namespace mla
