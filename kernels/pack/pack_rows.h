// The kernels of pack_kv and pack_kv_fp8, for CUDA and HIP: the nope part of each head's key beside the rope part that
// all heads share; values apart where they change their type.
//
// They wait for memory alone. A block takes some (token, head) rows in their order and a thread a few groups of eight
// columns of them, all of whose loads are on their way before the first store. The up-projection is read once, each
// rope key by neighbouring rows, so from L1.
#pragma once

#include <type_traits>

#include "kernels/group.h"
#include "kernels/params.h"

namespace mla {

constexpr int kPackThreads = 256;
constexpr int kPackRows = 32;  // a block
constexpr int kNopeGroups = kNope / kGroup;
constexpr int kKeyGroups = kHeadDim / kGroup;
constexpr int kUpWidth = 2 * kNope;

__device__ __forceinline__ float scale_of(const float* scale) { return scale == nullptr ? 1.0f : *scale; }

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

// Values in tiles, as kValueTile says, by a thread for two columns of a (tile, head). Keys are pack_rows's.
template <class Input>
__device__ __forceinline__ void tile_values(const PackKvParams& p) {
  constexpr int kRowThreads = kNope / 2;
  const int64_t row = (int64_t{blockIdx.x} * kPackThreads + threadIdx.x) / kRowThreads,
                first = row / p.heads * kValueTile;
  if (first >= p.tokens) return;
  const int column = threadIdx.x % kRowThreads * 2;
  const Input* up = static_cast<const Input*>(p.kv_up) + (first * p.heads + row % p.heads) * kUpWidth + kNope + column;
  const int64_t left = p.tokens - first;
  using Pair = Vector<Input, 2>;
  Pair read[kValueTile];
#pragma unroll
  for (int key = 0; key < kValueTile; ++key) {
    if (key < left) read[key] = *reinterpret_cast<const Pair*>(up + int64_t{key} * p.heads * kUpWidth);
  }
  const Divisor divide(scale_of(p.packed_v_scale));
  uint8_t* target = static_cast<uint8_t*>(p.v) + (row * kNope + column) * kValueTile;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float x[kValueTile];
#pragma unroll
    for (int key = 0; key < kValueTile; ++key) x[key] = key < left ? divide.divide(to_float(read[key].at[e])) : 0;
    uint32_t words[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint32_t high = e4m3fn_pair(x[2 * q + 8], x[2 * q + 9], p.saturate);
      words[q] = e4m3fn_pair(x[2 * q], x[2 * q + 1], p.saturate) | high << 16;
    }
    store_words(target + e * kValueTile, words[0], words[1], words[2], words[3]);
  }
}

}  // namespace mla
