// The attending warpgroups: S = Q K^T with the queries in registers, the online softmax, O += P V. While the weights of
// a block are computed, its successor's scores and its predecessor's output are on the tensor cores.
//
// Lane 4 * g + t of a group's warp w has rows 16w + g and 16w + g + 8; of the scores keys 8j + 2t and 8j + 2t + 1, in
// score[4j], score[4j + 1] for the upper row and score[4j + 2], score[4j + 3] for the lower one; of the output likewise
// the columns.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/wgmma_e4m3.cuh"
#include "kernels/cuda/wgmma_registers.cuh"
#include "kernels/decode/softmax.h"
#include "kernels/prefill/sm90/output.cuh"
#include "kernels/prefill/sm90/retry.cuh"
#include "kernels/prefill/sm90/shape.h"

namespace mla::sm90_prefill {

template <class Format>
using Queries = uint32_t[Format::kKeySteps][4];
template <class Format>
using Weights = uint32_t[Format::kWeightSteps][4];
using Scores = float[kBlockKeys / 2];

// How scores become exponents of 2: s * scale, where `flip` has been applied to the queries.
struct Scaling {
  float scale;    // above 0: masks put -inf among the scores
  uint32_t flip;  // of four e4m3 values: their signs, where the scale is below 0
};

template <class Format>
__device__ __forceinline__ Scaling scaling_of(const PrefillParams& p) {
  if constexpr (!Format::kFp8Keys) {
    return {p.scale * kLog2E, 0};
  } else {
    constexpr float kAlmostZero = 1e-36f;  // times any score it is nothing, and times -inf it is -inf
    float scale = p.scale * kLog2E;
    if (p.q_scale != nullptr) scale *= *p.q_scale;
    if (p.k_scale != nullptr) scale *= *p.k_scale;
    return {scale == 0 ? kAlmostZero : fabsf(scale), scale < 0 ? 0x80808080 : 0};
  }
}

// To registers, whence the products take them; the next tile's may then come into their place.
template <class Format>
__device__ __forceinline__ void read_queries(uint32_t shared, uint32_t flip, Queries<Format>& queries) {
  constexpr int kVectors = Format::kKeyLine / 16, kSwizzledLines = 8 / kVectors;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % kGroupWarps * 16 + lane % 16, half = lane / 16;
#pragma unroll
  for (int step = 0; step < Format::kKeySteps; ++step) {
    const int chunk = step / Format::kLineSteps, vector = step % Format::kLineSteps * 2 + half;
    ptx::ldmatrix_x4(shared + chunk * Format::kQueryChunkBytes + row * Format::kKeyLine +
                         ((vector ^ (row / kSwizzledLines % kVectors)) << 4),
                     queries[step]);
    if constexpr (Format::kFp8Keys) {
#pragma unroll
      for (uint32_t& four : queries[step]) four ^= flip;
    }
  }
}

// Committed, not waited for.
template <class Format>
__device__ __forceinline__ void score_block(const Queries<Format>& queries, uint32_t shared, Scores& score) {
  using Key = typename Format::Key;
  const uint32_t keys = ptx::matrix_operand(shared);
  ptx::hold(score);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Format::kKeySteps; ++step) {
    const int chunk = step / Format::kLineSteps, byte = step % Format::kLineSteps * 32;
    const uint32_t operand = keys + (chunk * Format::kKeyChunkBytes + byte) / 16;
    if constexpr (Format::kFp8Keys) {
      ptx::wgmma_e4m3<ptx::ShortLines>(score, queries[step], operand, step != 0);
    } else {
      ptx::wgmma_registers<Key, /*kTransposed=*/false>(score, queries[step], operand, step != 0);
    }
  }
  ptx::wgmma_commit();
}

// Committed, not waited for.
template <class Format>
__device__ __forceinline__ void accumulate_block(const Weights<Format>& weights, uint32_t shared, Output& out) {
  constexpr int kPieces = Format::kFp8Values ? Format::kValueTileBytes : Format::kValueChunkBytes;
  const uint32_t values = ptx::wide_operand<kPieces>(shared);
  ptx::hold(out);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Format::kWeightSteps; ++step) {
    if constexpr (Format::kFp8Values) {
      ptx::wgmma_e4m3<ptx::Tiles>(out, weights[step], values + step * 2 * Format::kValueTileBytes / 16, true);
    } else {
      constexpr int kStepBytes = Format::kValueChunkBytes / Format::kWeightSteps;
      ptx::wgmma_registers<typename Format::Value, /*kTransposed=*/true>(out, weights[step],
                                                                         values + step * kStepBytes / 16, true);
    }
  }
  ptx::wgmma_commit();
}

// -inf where a row does not see a key: of the block's, each row sees those from `first` on and before `visible`; with
// `words`, which know of `first`, those whose bit there is set.
template <class Format, bool kKeyMask>
__device__ __forceinline__ void mask_scores(int32_t first, const int32_t (&visible)[2], const uint32_t (&words)[4],
                                            Scores& score) {
  const int t = threadIdx.x % 4;
  const int32_t start = first - 2 * t, limits[2] = {visible[0] - 2 * t, visible[1] - 2 * t};
#pragma unroll
  for (int j = 0; j < kBlockKeys / 8; ++j) {
    const uint32_t bits = kKeyMask ? words[j / 4] >> (2 * t) : 0xFFFFFFFF;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int32_t key = 8 * j + e % 2;
      const bool seen = key < limits[e / 2] && (kKeyMask || key >= Format::kKeyAlignment || key >= start) &&
                        (!kKeyMask || bits >> (j % 4 * 8 + e % 2) & 1);
      if (!seen) score[4 * j + e] = -INFINITY;
    }
  }
}

// Scores become weights, by the online softmax. `factor` rescales what was summed before.
template <class Format>
__device__ __forceinline__ void weigh_scores(float scale, Scores& score, Rows& rows, float (&factor)[2]) {
  float highest[4] = {score[0], score[1], score[2], score[3]};
#pragma unroll
  for (int i = 4; i < kBlockKeys / 2; ++i) highest[i % 4] = fmaxf(highest[i % 4], score[i]);
  float sums[4] = {0, 0, 0, 0};
  float references[2], offsets[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float block = combine_over_t(fmaxf(highest[2 * e], highest[2 * e + 1]), fmaxf) * scale;
    references[e] = fmaxf(rows.reference[e], block);
    factor[e] = ptx::exp2_approximate(rows.reference[e] - references[e]);
    rows.reference[e] = references[e];
    offsets[e] = Format::kWeightShift == 0 ? -references[e] : Format::kWeightShift - references[e];
  }
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i) {
    score[i] = ptx::exp2_approximate(fmaf(score[i], scale, offsets[i % 4 / 2]));
    sums[i % 4] += score[i];
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) rows.sum[e] = rows.sum[e] * factor[e] + (sums[2 * e] + sums[2 * e + 1]);
}

__device__ __forceinline__ void rescale(const float (&factor)[2], Output& out) {
#pragma unroll
  for (int i = 0; i < kNope / 2; ++i) out[i] *= factor[i % 4 / 2];
}

// As the A of the next product. In e4m3 it has four columns of a lane where there are two keys, and two more 8 keys on:
// the values' tiles have their keys in that order.
template <class Format>
__device__ __forceinline__ void pack_weights(const Scores& score, Weights<Format>& weights) {
#pragma unroll
  for (int i = 0; i < Format::kWeightSteps * 4; ++i) {
    uint32_t& target = weights[i / 4][i % 4];
    if constexpr (Format::kFp8Values) {
      const int low = i / 2 * 8 + i % 2 * 2;
      target = e4m3fn_pair(score[low], score[low + 1], /*saturate=*/true) |
               static_cast<uint32_t>(e4m3fn_pair(score[low + 4], score[low + 5], /*saturate=*/true)) << 16;
    } else {
      target = pack<typename Format::Value>(score[2 * i], score[2 * i + 1]);
    }
  }
}

// What a group needs of the tile whose blocks it goes through. Keys are counted from the first block's first.
struct Sight {
  int32_t first;         // key of the request
  int32_t visible[2];    // each row sees the keys of the request before this one
  int32_t whole_blocks;  // of which all rows see all keys, those before the request and the key mask aside
};

template <class Format>
__device__ __forceinline__ Sight sight_of(const Tile& tile, bool causal, int group, int row) {
  Sight sight;
  const int32_t origin = Format::origin(tile.kv_begin);
  sight.first = Format::kKeyAlignment > 1 ? __shfl_sync(0xFFFFFFFF, tile.kv_begin - origin, 0) : 0;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    sight.visible[e] = visible_end(tile, causal, tile.first_query + row + 8 * e) - origin;
  }
  const int32_t all_see = visible_end(tile, causal, tile.first_query + group * kGroupQueries) - origin;
  sight.whole_blocks = __shfl_sync(0xFFFFFFFF, all_see / kBlockKeys, 0);
  return sight;
}

// The scores of `block`, which are there, masked; its keys are given back.
template <class Format, bool kMasked, bool kKeyMask>
__device__ __forceinline__ void finish_scores(const Sight& sight, int32_t block, uint32_t key_empty,
                                              const uint32_t* key_words, Scores& score) {
  ptx::hold(score);
  uint32_t words[4];
  if constexpr (kKeyMask) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = key_words[i];
    __syncwarp();
  }
  ptx::mbarrier_arrive_in_step(key_empty);
  if constexpr (kMasked || kKeyMask) {
    const int32_t first = block * kBlockKeys;
    mask_scores<Format, kKeyMask>(sight.first - first, {sight.visible[0] - first, sight.visible[1] - first}, words,
                                  score);
  }
}

// In e4m3 softmax takes longer than the products: groups ask for theirs in turn, so that one group's softmax runs
// beside the other's products.
template <class Format>
__device__ __forceinline__ void await_turn(int group) {
  if constexpr (Format::kFp8Values) ptx::barrier_sync(kTurnBarriers + group, kGroups * kGroupThreads);
}

template <class Format>
__device__ __forceinline__ void give_turn(int group) {
  if constexpr (Format::kFp8Values) ptx::barrier_arrive(kTurnBarriers + 1 - group, kGroups * kGroupThreads);
}

constexpr int32_t kNoTile = -2;

template <class Format, bool kKeyMask>
__device__ __forceinline__ void attend_tiles(const PrefillParams& p, uint32_t memory, Control& control) {
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32 % kGroupWarps, 0);
  const int group = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  const int row = group * kGroupQueries + warp * 16 + lane / 4;
  const uint32_t barriers = ptx::shared_address(&control);
  const Scaling scaling = scaling_of<Format>(p);
  Ring<Format::kStages> keys, values;
  Queries<Format> queries;
  Scores score;

  const auto await_keys = [&] {
    ptx::mbarrier_wait(barrier_at(barriers, offsetof(Control, key_full), keys.slot()), keys.parity());
  };
  const auto start_scores = [&] {
    score_block<Format>(queries, memory + Format::kKeysAt + keys.slot() * Format::kKeyBytes, score);
  };
  // The tile's queries, to registers, and its first keys. Returns the number of its last block, -1 where it has none,
  // or kNoTile. Scores may be started in any case: what no keys are there for is not looked at.
  const auto await_tile = [&](const Ring<kTiles>& position) {
    ptx::mbarrier_wait(barrier_at(barriers, offsetof(Control, tile_full), position.slot()), position.parity());
    const Tile& tile = control.tiles[position.slot()];
    if (__shfl_sync(0xFFFFFFFF, tile.rows, 0) == 0) return kNoTile;
    const int32_t block = __shfl_sync(0xFFFFFFFF, tile.blocks, 0) - 1;
    ptx::mbarrier_wait(barrier_at(barriers, offsetof(Control, query_full), group), position.count % 2);
    read_queries<Format>(memory + Format::kQueriesAt + group * Format::kQueryBytes, scaling.flip, queries);
    ptx::mbarrier_arrive_warp(barrier_at(barriers, offsetof(Control, query_empty), group));
    if (block >= 0) await_keys();
    return block;
  };
  const auto await_first_scores = [&](const Ring<kTiles>& position) {
    const int32_t block = await_tile(position);
    await_turn<Format>(group);
    start_scores();
    give_turn<Format>(group);
    ptx::wgmma_wait<0>();
    ptx::hold(score);
    return block;
  };

  forget_retries(control.retries[group * kGroupWarps + warp]);
  if (group != 0) give_turn<Format>(group);
  Ring<kTiles> position;
  int32_t block = await_first_scores(position);
  while (block != kNoTile) {
    const Tile& tile = control.tiles[position.slot()];
    const int32_t slot = position.slot();
    const bool has_keys = block >= 0;
    Rows rows;
    Output out = {};
    position.advance();
    if (has_keys) {
      const Sight sight = sight_of<Format>(tile, p.causal, group, row);
      Weights<Format> weights;
      float factor[2];
      finish_scores<Format, true, kKeyMask>(sight, block,
                                            barrier_at(barriers, offsetof(Control, key_empty), keys.slot()),
                                            control.key_words[keys.slot()], score);
      keys.advance();
      weigh_scores<Format>(scaling.scale, score, rows, factor);
      pack_weights<Format>(score, weights);

      const auto accumulate = [&] {
        ptx::mbarrier_wait(barrier_at(barriers, offsetof(Control, value_full), values.slot()), values.parity());
        accumulate_block<Format>(weights, memory + Format::kValuesAt + values.slot() * Format::kValueBytes, out);
      };
      const auto await_output = [&] {
        ptx::wgmma_wait<0>();
        ptx::hold(out);
        ptx::mbarrier_arrive_in_step(barrier_at(barriers, offsetof(Control, value_empty), values.slot()));
        values.advance();
      };
      const auto step = [&](auto masked) {
        await_keys();
        await_turn<Format>(group);
        start_scores();
        accumulate();
        give_turn<Format>(group);
        ptx::wgmma_wait<1>();
        finish_scores<Format, decltype(masked)::value, kKeyMask>(
            sight, block, barrier_at(barriers, offsetof(Control, key_empty), keys.slot()),
            control.key_words[keys.slot()], score);
        keys.advance();
        weigh_scores<Format>(scaling.scale, score, rows, factor);
        await_output();
        rescale(factor, out);
        pack_weights<Format>(score, weights);
      };
      --block;
      const int32_t partial = sight.first > 0 ? 1 : 0;  // block 0 then has keys before the request's
      do {
#pragma unroll 1
        for (; block >= 0 && (block >= sight.whole_blocks || block < partial); --block) step(std::true_type{});
#pragma unroll 1
        for (; block >= partial; --block) step(std::false_type{});
      } while (Format::kKeyAlignment > 1 && block >= 0);

      // The next tile's first scores are computed beside this one's last output.
      block = await_tile(position);
      await_turn<Format>(group);
      start_scores();
      accumulate();
      give_turn<Format>(group);
      await_output();
      ptx::hold(score);
    }
    if (is_writing(tile, group * kGroupWarps + warp, row, out)) {
      const int32_t* unusable = control.unusable[slot];
      finish_tile<Format>(p, tile, unusable[0] < unusable[1] ? unusable[0] : unusable[1], row, rows, out);
    } else if (tile.careful == 0 && lane == 0) {
      note_retry(tile, control.retries[group * kGroupWarps + warp]);
    }
    ptx::mbarrier_arrive_warp(barrier_at(barriers, offsetof(Control, tile_empty), slot));
    if (!has_keys) block = await_first_scores(position);
  }
}

}  // namespace mla::sm90_prefill
