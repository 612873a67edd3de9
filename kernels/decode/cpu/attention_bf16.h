// Arithmetic in pairs of bf16 summed in fp32 (vdpbf16ps), for bf16 and fp8 queries and caches: e4m3 is exact in bf16.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/units.h"
#include "kernels/decode/cpu/attention_core.h"

namespace mla::MLA_ISA {

// fp8 codes to bf16, 32 at a time, by a table of the 128 magnitudes in four registers.
struct E4M3Table {
  __m512i words[4];

  template <DType kType>
  static E4M3Table make() {
    uint16_t bits[128];
    for (int i = 0; i < 128; i += kLanes) {
      Byte codes;
      for (int lane = 0; lane < kLanes; ++lane) codes[lane] = static_cast<uint8_t>(i + lane);
      store_from_float<DType::kBF16>(bits + i,
                                     kType == DType::kE4M3FN ? e4m3_to_float<7>(codes) : e4m3_to_float<8>(codes));
    }
    E4M3Table table;
    memcpy(table.words, bits, sizeof(bits));
    return table;
  }

  template <DType kType>
  MLA_INLINE __m512i operator()(__m256i codes) const {
    const __m512i index = _mm512_cvtepu8_epi16(codes);
    const __m512i low = _mm512_permutex2var_epi16(words[0], index, words[1]);
    const __m512i high = _mm512_permutex2var_epi16(words[2], index, words[3]);
    const __mmask32 is_high = _mm512_test_epi16_mask(index, _mm512_set1_epi16(0x40));
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(index, _mm512_set1_epi16(0x80)), 8);
    const __m512i value = _mm512_or_si512(_mm512_mask_blend_epi16(is_high, low, high), sign);
    if (kType == DType::kE4M3FN) return value;
    const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(index, _mm512_set1_epi16(0x80));
    return _mm512_mask_blend_epi16(is_nan, value, _mm512_set1_epi16(0x7fc0));
  }
};

struct BFloat16Pairs : PairUnits {
  using W = Workspace<Unit, 2>;

  template <DType kType>
  static void transpose_query(const void* source, int64_t width, Unit* target, int64_t stride) {
    for (int64_t i = 0; i < width; i += kLanes, target += kLanes / 2 * stride) {
      const Float x = load_as_float<kType>(static_cast<const char*>(source) + i * bytes_of(kType));
      const Half narrow = float_to_bfloat(x);
      for (int pair = 0; pair < kLanes / 2; ++pair) {
        target[pair * stride] = narrow[2 * pair] | static_cast<uint32_t>(narrow[2 * pair + 1]) << 16;
      }
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
        transpose_query<kType>(rope, kRope, w.queries + kLatent / 2 * w.stride + row, w.stride);
      }
    });
  }

  template <DType kType>
  static void stage_fp8(const BlockTokens& block, W& w) {
    const E4M3Table table = E4M3Table::make<kType>();
    for (int32_t t = 0; t < block.count; ++t) {
      if (block.address[t] == nullptr) continue;
      Unit* const target = w.staged + t * W::kUnits;
      for (int64_t i = 0; i < kWidth; i += 32) {
        const __m256i codes = load_bits<__m256i>(block.address[t] + i);
        _mm512_storeu_si512(target + i / 2, table.operator()<kType>(codes));
      }
      w.keys[t] = target;
    }
  }

  // The keys stay e4m3, which bf16 holds: the scores take the scales, so that they are as exact as the queries.
  static void stage_ds_mla(const BlockTokens& block, W& w) {
    const E4M3Table table = E4M3Table::make<DType::kE4M3FN>();
    for (int32_t t = 0; t < kWorkTokens; ++t) {
      const char* const source = block.address[t];
      for (int64_t group = 0; group < kLatent / kDsMlaGroup; ++group) {
        w.key_scales[group * kWorkTokens + t] = source == nullptr ? 0 : ds_mla_scale(source, group);
      }
      if (source == nullptr) continue;
      Unit* const target = w.staged + t * W::kUnits;
      for (int64_t i = 0; i < kLatent; i += 32) {
        _mm512_storeu_si512(target + i / 2, table.operator()<DType::kE4M3FN>(load_bits<__m256i>(source + i)));
      }
      memcpy(target + kLatent / 2, source + kDsMlaRope, 2 * kRope);
      w.keys[t] = target;
    }
  }

  // A token's latent with its scales, rounded to bf16.
  static void scale_latent(const W& w, int32_t token, Unit* target) {
    for (int64_t group = 0; group < kLatent / kDsMlaGroup; ++group) {
      const __m512 scale = _mm512_set1_ps(w.key_scales[group * kWorkTokens + token]);
      for (int64_t i = group * kDsMlaGroup / 2; i < (group + 1) * kDsMlaGroup / 2; i += kLanes) {
        const auto widened = [](__m256i half) {
          return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
        };
        const __m512i values = load(w.keys[token] + i);
        const __m512 low = _mm512_mul_ps(widened(_mm512_castsi512_si256(values)), scale);
        const __m512 high = _mm512_mul_ps(widened(_mm512_extracti64x4_epi64(values, 1)), scale);
        _mm512_storeu_si512(target + i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
      }
    }
  }

  // Weaves two tokens' latents into pairs.
  static MLA_INLINE void weave(const Unit* even, const Unit* odd, Unit* target) {
    const auto index = [](int first) {
      const __m512i pairs = _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                             _mm512_set1_epi32(first));
      return _mm512_or_si512(pairs, _mm512_slli_epi32(_mm512_or_si512(pairs, _mm512_set1_epi32(32)), 16));
    };
    const __m512i low = index(0), high = index(16);
    for (int64_t i = 0; i < kLatent / 2; i += kLanes) {
      const __m512i a = load(even + i), b = load(odd + i);
      _mm512_storeu_si512(target + 2 * i, _mm512_permutex2var_epi16(a, low, b));
      _mm512_storeu_si512(target + 2 * i + kLanes, _mm512_permutex2var_epi16(a, high, b));
    }
  }

  // A bf16 cache's keys are used where they lie; values are always woven.
  static void stage(const AttentionItem& item, const BlockTokens& block, W& w) {
    for (int32_t t = 0; t < kWorkTokens; ++t) {
      const bool in_place = block.address[t] != nullptr && item.cache_dtype == DType::kBF16;
      w.keys[t] = in_place ? reinterpret_cast<const Unit*>(block.address[t]) : w.zeros;
    }
    if (item.ds_mla) {
      stage_ds_mla(block, w);
    } else if (item.cache_dtype == DType::kE4M3FN) {
      stage_fp8<DType::kE4M3FN>(block, w);
    }
    if (item.cache_dtype == DType::kE4M3FNUZ) stage_fp8<DType::kE4M3FNUZ>(block, w);
    for (int32_t i = 0; i < W::kValueRows; ++i) {
      w.values[i] = w.value_rows + i * kAccumulatorStride;
      if (2 * i >= block.count) continue;
      Unit* const target = w.value_rows + i * kAccumulatorStride;
      if (w.key_scales == nullptr) {
        weave(w.keys[2 * i], w.keys[2 * i + 1], target);
      } else {
        alignas(64) Unit even[kLatent / 2], odd[kLatent / 2];
        scale_latent(w, 2 * i, even);
        scale_latent(w, 2 * i + 1, odd);
        weave(even, odd, target);
      }
    }
  }

  static void scores(const W& w, int32_t vectors, int32_t tokens) {
    score_block<BFloat16Pairs>(w, vectors, (tokens + 7) / 8 * 8);
  }

  static void pack_probabilities(const W& w, int32_t vectors, int32_t tokens) {
    for (int32_t i = 0; i < taken_tokens(tokens) / kPack; ++i) {
      for (int64_t row = 0; row < vectors * kLanes; row += kLanes) {
        const float* const even = w.scores + 2 * i * w.stride + row;
        const Int low = __builtin_convertvector(float_to_bfloat(mla::MLA_ISA::load(even)), Int);
        const Int high = __builtin_convertvector(float_to_bfloat(mla::MLA_ISA::load(even + w.stride)), Int);
        const Int pair = low | high << 16;
        memcpy(w.probabilities + i * w.stride + row, &pair, sizeof(pair));
      }
    }
  }

  static void accumulate(const W& w, int32_t rows, int32_t tokens) {
    accumulate_block<BFloat16Pairs>(w, 0, rows, (tokens + 1) / 2);
  }

  // Rows [begin, end) take the first `tokens` tokens; the partner of an odd last one is left out.
  static void accumulate_first(W& w, int32_t begin, int32_t end, int32_t tokens) {
    const int32_t last = tokens / 2;
    if (tokens % 2 == 0) return accumulate_block<BFloat16Pairs>(w, begin, end, last);
    Unit* const spare = w.value_rows + W::kValueRows * kAccumulatorStride;
    const Unit* const woven = w.values[last];
    for (int64_t i = 0; i < kLatent; i += kLanes) {
      _mm512_storeu_si512(spare + i, _mm512_and_si512(load(woven + i), _mm512_set1_epi32(0xffff)));
    }
    w.values[last] = spare;
    accumulate_block<BFloat16Pairs>(w, begin, end, last + 1);
    w.values[last] = woven;
  }
};

}  // namespace mla::MLA_ISA
