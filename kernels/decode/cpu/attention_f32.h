// Arithmetic in fp32, for queries and caches of every dtype.
#pragma once

#include "kernels/cpu/units.h"
#include "kernels/decode/cpu/attention_core.h"

namespace mla::MLA_ISA {

struct Float32 : FloatUnits {
  using W = Workspace<Unit, 1>;

  template <DType kType>
  static void transpose_query(const void* source, int64_t width, float* target, int64_t stride) {
    for (int64_t i = 0; i < width; i += kLanes) {
      const Float x = load_as_float<kType>(static_cast<const char*>(source) + i * bytes_of(kType));
      for (int lane = 0; lane < kLanes; ++lane) target[(i + lane) * stride] = x[lane];
    }
  }

  static void pack_queries(const AttentionItem& item, W& w) {
    memset(w.queries, 0, W::kUnits * w.stride * sizeof(Unit));
    with_dtype(item.q_dtype, [&](auto type) {
      constexpr DType kType = decltype(type)::kValue;
      for (int64_t row = 0; row < item.rows; ++row) {
        const char* const latent =
            static_cast<const char*>(item.q_latent) + row * item.q_latent_stride * bytes_of(kType);
        const char* const rope = static_cast<const char*>(item.q_rope) + row * item.q_rope_stride * bytes_of(kType);
        transpose_query<kType>(latent, kLatent, w.queries + row, w.stride);
        transpose_query<kType>(rope, kRope, w.queries + kLatent * w.stride + row, w.stride);
      }
    });
  }

  // n values of one dtype, multiplied with their scale.
  template <DType kType>
  static MLA_INLINE void convert(const char* source, int64_t n, float scale, float* target) {
    for (int64_t i = 0; i < n; i += kLanes)
      store(target + i, load_as_float<kType>(source + i * bytes_of(kType)) * scale);
  }

  static void stage_ds_mla(const BlockTokens& block, W& w) {
    for (int32_t t = 0; t < kWorkTokens; ++t) {
      const char* const source = block.address[t];
      w.keys[t] = w.values[t] = w.zeros;
      if (source == nullptr) continue;
      Unit* const target = w.staged + t * W::kUnits;
      for (int64_t group = 0; group < kLatent / kDsMlaGroup; ++group) {
        convert<DType::kE4M3FN>(source + group * kDsMlaGroup, kDsMlaGroup, ds_mla_scale(source, group),
                                target + group * kDsMlaGroup);
      }
      convert<DType::kBF16>(source + kDsMlaRope, kRope, 1.0f, target + kLatent);
      w.keys[t] = w.values[t] = target;
    }
  }

  // An fp32 cache is used where it lies, another one converted.
  static void stage(const AttentionItem& item, const BlockTokens& block, W& w) {
    if (item.ds_mla) return stage_ds_mla(block, w);
    with_dtype(item.cache_dtype, [&](auto type) {
      constexpr DType kType = decltype(type)::kValue;
      for (int32_t t = 0; t < kWorkTokens; ++t) {
        const char* const source = block.address[t];
        const Unit* row = w.zeros;
        if (source != nullptr && kType == DType::kF32) {
          row = reinterpret_cast<const Unit*>(source);
        } else if (source != nullptr) {
          Unit* const target = w.staged + t * W::kUnits;
          for (int64_t i = 0; i < kWidth; i += kLanes) {
            store(target + i, load_as_float<kType>(source + i * bytes_of(kType)));
          }
          row = target;
        }
        w.keys[t] = w.values[t] = row;
      }
    });
  }

  static void scores(const W& w, int32_t vectors, int32_t tokens) {
    score_block<Float32>(w, vectors, (tokens + 7) / 8 * 8);
  }

  static void pack_probabilities(const W&, int32_t, int32_t) {}  // they are used where the scores lie

  static void accumulate(const W& w, int32_t rows, int32_t tokens) { accumulate_block<Float32>(w, 0, rows, tokens); }

  static void accumulate_first(const W& w, int32_t begin, int32_t end, int32_t tokens) {
    accumulate_block<Float32>(w, begin, end, tokens);
  }
};

inline int64_t f32_scratch_bytes(int32_t rows) { return Float32::W{}.carve(nullptr, rows); }

}  // namespace mla::MLA_ISA
