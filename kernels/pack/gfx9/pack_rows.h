// The kernel of pack_kv and pack_kv_fp8 on AMD: the nope part of each head's key beside the rope part that
// all heads share; values apart where they change their type.
//
// They wait for memory alone. A block takes some (token, head) rows in their order and a thread a few groups of eight
// columns of them, all of whose loads are on their way before the first store. The up-projection is read once, each
// rope key by neighbouring rows, so from L1.
#pragma once

#include <type_traits>

#include "kernels/pack/gfx9/tile_values.h"

namespace mla {

constexpr int kPackRows = 32;  // a block
constexpr int kNopeGroups = kNope / kGroup;
constexpr int kKeyGroups = kHeadDim / kGroup;

template <class Input, class Rope, class Output>
__device__ __forceinline__ void pack_rows(const PackKvParams& p) {
  constexpr bool kValues = !std::is_same_v<Input, Output>;
  constexpr int kGroups = kKeyGroups + (kValues ? kNopeGroups : 0);  // of a row: key, then value
  constexpr int kSteps = kPackRows * kGroups / kPackThreads;
  static_assert(kPackRows * kGroups % kPackThreads == 0 && sizeof(Rope) <= sizeof(Input));
  const int64_t first_row = int64_t{blockIdx.x} * kPackRows, first_token = first_row / p.heads;
  const int64_t rows_left = p.tokens * p.heads - first_row;
  const int rows = rows_left < kPackRows ? static_cast<int>(rows_left) : kPackRows;
  const auto first_head = static_cast<uint32_t>(first_row - first_token * p.heads),
             heads = static_cast<uint32_t>(p.heads);
  const Input* up = static_cast<const Input*>(p.kv_up) + first_row * kUpWidth;
  const Rope* rope = static_cast<const Rope*>(p.k_pe) + p.k_pe_offset + first_token * p.k_pe_stride;
  const auto is_rope = [](int group) { return group >= kNopeGroups && group < kKeyGroups; };

  const auto is_left_out = [&](int group) { return kValues && p.v_tiled && group >= kKeyGroups; };

  GroupBits<Input> read[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int i = step * kPackThreads + static_cast<int>(threadIdx.x), row = i / kGroups, group = i % kGroups;
    if (row >= rows) break;
    if (is_left_out(group)) continue;
    if (is_rope(group)) {
      const int64_t token = (first_head + row) / heads;
      const auto bits = load_group<Rope>(rope + token * p.k_pe_stride + (group - kNopeGroups) * kGroup);
      memcpy(&read[step], &bits, sizeof(bits));
    } else {
      const int column = (group < kNopeGroups ? group : group - (kKeyGroups - kNopeGroups)) * kGroup;
      read[step] = load_group<Input, /*kOnce=*/true>(up + row * kUpWidth + column);
    }
  }

  // Scales belong to fp8: where there is none, the compiler knows that bits are moved.
  const float k_scale = sizeof(Rope) == 1 ? scale_of(p.k_scale) : 1;
  const Divisor key_divide = kValues ? Divisor(scale_of(p.packed_k_scale)) : Divisor();
  const Divisor value_divide = kValues ? Divisor(scale_of(p.packed_v_scale)) : Divisor();
  Output* k = static_cast<Output*>(p.k) + first_row * kHeadDim;
  Output* v = static_cast<Output*>(p.v) + first_row * kNope;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int i = step * kPackThreads + static_cast<int>(threadIdx.x), row = i / kGroups, group = i % kGroups;
    if (row >= rows) break;
    if (is_left_out(group)) continue;
    GroupBits<Output> packed;
    if (is_rope(group)) {
      GroupBits<Rope> bits;
      memcpy(&bits, &read[step], sizeof(bits));
      packed = convert_group<Output, Rope>(bits, {k_scale, key_divide, p.saturate});
    } else {
      const Divisor& divide = group < kNopeGroups ? key_divide : value_divide;
      packed = convert_group<Output, Input>(read[step], {1, divide, p.saturate});
    }
    store_group<Output>(
        group < kKeyGroups ? k + row * kHeadDim + group * kGroup : v + row * kNope + (group - kKeyGroups) * kGroup,
        packed);
  }
}

}  // namespace mla
