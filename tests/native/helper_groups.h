// Tests of update_cache, merge_states, pack_kv and gather_context, one function a group.
#pragma once

#include <algorithm>

#include "kernels/entry.h"
#include "tests/native/support.h"

namespace mla::test {

// ---- update_cache

inline UpdateCacheParams update_params(Array& cache, Array& kv_c, Array& k_pe, Buffer<int32_t>& slots, int page_size) {
  UpdateCacheParams p{};
  p.cache = cache.data();
  p.kv_c = kv_c.data();
  p.k_pe = k_pe.data();
  p.slot_mapping = slots.data();
  p.pages = cache.count() / kWidth / page_size;
  p.layers = 1;
  p.page_size = page_size;
  p.tokens = static_cast<int32_t>(slots.size());
  p.input_dtype = kv_c.type;
  p.cache_dtype = cache.type;
  return p;
}

inline bool same_but_nan_sign(DType type, uint32_t a, uint32_t b) {
  return a == b || (type == DType::kE4M3FN && (a & 0x7f) == 0x7f && (b & 0x7f) == 0x7f);
}

inline double saturated(DType type, double x) {
  const double largest = type == DType::kE4M3FN ? 448 : 240;
  return std::isnan(x) ? x : std::clamp(x, -largest, largest);
}

// Every bf16 and fp16 value, and fp32 values around every rounding boundary, through the cache's casts.
inline void test_casts(const Device& device) {
  for (DType target : {DType::kE4M3FN, DType::kE4M3FNUZ}) {
    for (DType source : {DType::kBF16, DType::kF16, DType::kF32}) {
      std::vector<uint32_t> codes;
      for (uint32_t i = 0; i < 65536; ++i) codes.push_back(i);
      if (source == DType::kF32) {
        codes.clear();
        for (uint32_t i = 0; i < 65536; ++i) {
          for (uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0xffffu}) codes.push_back(i << 16 | low);
        }
      }
      codes.resize((codes.size() + kWidth - 1) / kWidth * kWidth);
      const auto tokens = static_cast<int32_t>(codes.size() / kWidth);
      Array kv_c(source, int64_t{tokens} * kLatent), k_pe(source, int64_t{tokens} * kRope);
      Buffer<int32_t> slots;
      for (int32_t t = 0; t < tokens; ++t) {
        slots.push_back(t);
        for (int c = 0; c < kLatent; ++c) kv_c.set_code(int64_t{t} * kLatent + c, codes[t * kWidth + c]);
        for (int c = 0; c < kRope; ++c) k_pe.set_code(int64_t{t} * kRope + c, codes[t * kWidth + kLatent + c]);
      }
      for (float scale : {1.0f, 0.37f}) {
        Scalar<float> k_scale(scale);
        for (bool saturate : {false, true}) {
          Array cache(target, int64_t{tokens} * kWidth);
          UpdateCacheParams p = update_params(cache, kv_c, k_pe, slots, 1);
          p.k_scale = k_scale.data();
          p.k_scales = 1;
          p.saturate = saturate;
          report.expect_success(update_cache(p, device));
          for (size_t i = 0; i < codes.size(); ++i) {
            const float scaled = static_cast<float>(value_of(source, codes[i])) / scale;
            const uint32_t wanted = encode(target, saturate ? saturated(target, scaled) : scaled);
            report.expect(same_but_nan_sign(target, wanted, cache.code(i)),
                          std::string(name_of(source)) + " " + std::to_string(codes[i]) + " to " + name_of(target) +
                              " is " + std::to_string(cache.code(i)) + ", expected " + std::to_string(wanted));
          }
        }
      }
    }
  }
  report.group("fp8 casts");
}

inline void test_update_cache() {
  Random random(9);
  for (int i = 0; i < (quick ? 10 : 60); ++i) {
    const DType cache_type = choose(random, {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3FN, DType::kE4M3FNUZ});
    const DType input = is_fp8(cache_type) ? choose(random, {DType::kBF16, DType::kF16, DType::kF32}) : cache_type;
    const int pages = 7, page_size = choose(random, {1, 4, 16}), layers = choose(random, {1, 2}),
              tokens = pick(random, 1, 150);
    const int64_t slots_per_layer = int64_t{pages} * page_size;
    Array cache(cache_type, layers * slots_per_layer * kWidth), kv_c(input, int64_t{tokens} * kLatent),
        k_pe(input, int64_t{tokens} * kRope);
    kv_c.fill_random(random, 0, kv_c.count());
    k_pe.fill_random(random, 0, k_pe.count());
    Buffer<int32_t> slots;
    for (int t = 0; t < tokens; ++t) {
      slots.push_back(choose(random, {pick(random, 0, static_cast<int>(slots_per_layer) - 1), pick(random, 0, 3), -1,
                                      INT32_MIN, INT32_MAX, static_cast<int>(slots_per_layer)}));
    }
    Scalar<int32_t> layer(choose(random, {0, layers - 1, layers, -1, INT32_MAX}));
    Buffer<float> scales{1.0f, 0.5f};
    UpdateCacheParams p = update_params(cache, kv_c, k_pe, slots, page_size);
    p.pages = pages;
    p.layers = layers;
    p.layer = layer.data();
    if (is_fp8(cache_type)) p.k_scale = scales.data();
    p.k_scales = is_fp8(cache_type) ? layers : 0;
    Array expected = cache;
    for (int t = 0; t < tokens && layer >= 0 && layer < layers; ++t) {
      if (slots[t] < 0 || slots[t] >= slots_per_layer) continue;
      const float scale = p.k_scale != nullptr ? scales[layers > 1 ? layer : 0] : 1.0f;
      for (int c = 0; c < kWidth; ++c) {
        const double x = c < kLatent ? kv_c.at(int64_t{t} * kLatent + c) : k_pe.at(int64_t{t} * kRope + c - kLatent);
        expected.set((layer * slots_per_layer + slots[t]) * kWidth + c, static_cast<float>(x) / scale);
      }
    }
    Buffer<int32_t> owners(1024);  // of the search for duplicates by hash, where a device has one
    p.owner_slots = pick(random, 0, 1) * 512;
    p.owners = p.owner_slots == 0 ? nullptr : owners.data();
    report.expect_success(update_cache(p, device_with(pick(random, 1, 4))));
    report.expect(expected.bytes == cache.bytes,
                  "update_cache " + std::string(name_of(input)) + " to " + name_of(cache_type));
  }
  report.group("update_cache");
}

// ---- merge_states and pack_kv

inline void test_merge_states() {
  Random random(10);
  for (int i = 0; i < (quick ? 30 : 100); ++i) {
    const DType type = choose(random, {DType::kBF16, DType::kF16, DType::kF32});
    const int rows = pick(random, 1, 90), width = choose(random, {1, 3, 128, 130, 512});
    Array a(type, int64_t{rows} * width), b = a, out = a;
    a.fill_random(random, 0, a.count());
    b.fill_random(random, 0, b.count());
    Buffer<float> lse_a, lse_b, lse(rows, kNaN);
    for (int row = 0; row < rows; ++row) {
      const auto any = [&] {
        return choose(random, {-kInfinity, kInfinity, kNaN, pick(random, -90, 90) / 10.0f, 0.5f, 1e5f});
      };
      lse_a.push_back(any());
      lse_b.push_back(any());
      for (int c = 0; c < width; ++c) {  // an empty side is not read
        if (!std::isfinite(lse_a[row])) a.set_code(int64_t{row} * width + c, nan_code(type));
        if (!std::isfinite(lse_b[row])) b.set_code(int64_t{row} * width + c, nan_code(type));
      }
    }
    const MergeStatesParams p = {a.data(),   lse_a.data(), b.data(), lse_b.data(), out.data(),
                                 lse.data(), rows,         width,    type};
    report.expect_success(merge_states(p, device_with(3)));
    for (int row = 0; row < rows; ++row) {
      const bool has_a = std::isfinite(lse_a[row]), has_b = std::isfinite(lse_b[row]);
      const double largest = std::max(has_a ? lse_a[row] : -kInfinity, has_b ? lse_b[row] : -kInfinity);
      const double wa = has_a ? std::exp(lse_a[row] - largest) : 0, wb = has_b ? std::exp(lse_b[row] - largest) : 0;
      const double wanted_lse = has_a || has_b ? largest + std::log(wa + wb) : -kInfinity;
      report.expect(lse[row] == wanted_lse || std::fabs(lse[row] - wanted_lse) <= 1e-5 + 1e-7 * std::fabs(wanted_lse),
                    "merged lse");
      for (int c = 0; c < width; ++c) {
        const int64_t at = int64_t{row} * width + c;
        const double sum = (has_a ? wa * a.at(at) : 0) + (has_b ? wb * b.at(at) : 0);
        const double wanted = has_a || has_b ? sum / (wa + wb) : 0;
        const double tolerance = type == DType::kF32 ? 1e-6 : type == DType::kF16 ? 1e-3 : 8e-3;
        report.expect(std::fabs(out.at(at) - wanted) <= tolerance, "merged out");
      }
    }
  }
  report.group("merge_states");
}

inline void test_pack_kv() {
  Random random(11);
  for (int i = 0; i < (quick ? 40 : 100); ++i) {
    const bool to_fp8 = pick(random, 0, 1) == 1;
    const DType input = choose(random, {DType::kBF16, DType::kF16, DType::kF32});
    const DType output = to_fp8 ? choose(random, {DType::kE4M3FN, DType::kE4M3FNUZ}) : input;
    const DType pe_type = choose(random, {input, DType::kE4M3FN, DType::kE4M3FNUZ});
    const int tokens = pick(random, 1, 9), heads = choose(random, {1, 3, 24});
    const bool gathered = pick(random, 0, 1) == 1;
    const int64_t stride = gathered ? kWidth : kRope, offset = gathered ? kLatent : 0;
    Array kv_up(input, int64_t{tokens} * heads * 2 * kNope), k_pe(pe_type, tokens * stride);
    kv_up.fill_random(random, 0, kv_up.count());
    for (int64_t t = 0; t < tokens; ++t) k_pe.fill_random(random, t * stride + offset, t * stride + offset + kRope);
    Array k(output, int64_t{tokens} * heads * kHeadDim), v(output, int64_t{tokens} * heads * kNope);
    Scalar<float> k_scale(choose(random, {1.0f, 0.75f})), packed_k(choose(random, {1.0f, 0.3f})),
        packed_v(choose(random, {1.0f, 0.6f}));
    PackKvParams p{};
    p.kv_up = kv_up.data();
    p.k_pe = k_pe.data();
    p.k_scale = is_fp8(pe_type) ? k_scale.data() : nullptr;
    p.packed_k_scale = to_fp8 ? packed_k.data() : nullptr;
    p.packed_v_scale = to_fp8 ? packed_v.data() : nullptr;
    p.k = k.data();
    p.v = to_fp8 ? v.data() : nullptr;
    p.k_pe_stride = stride;
    p.k_pe_offset = offset;
    p.tokens = tokens;
    p.heads = heads;
    p.saturate = pick(random, 0, 1) == 1;
    p.input_dtype = input;
    p.k_pe_dtype = pe_type;
    p.output_dtype = output;
    report.expect_success(pack_kv(p, device_with(3)));
    const float own_scale = k_scale, k_divide = to_fp8 ? float{packed_k} : 1.0f,
                v_divide = to_fp8 ? float{packed_v} : 1.0f;
    for (int64_t row = 0; row < int64_t{tokens} * heads; ++row) {
      for (int c = 0; c < kHeadDim + kNope; ++c) {
        const bool is_value = c >= kHeadDim;
        if (is_value && !to_fp8) break;
        float x;
        if (c >= kNope && !is_value) {
          const auto pe = static_cast<float>(k_pe.at(row / heads * stride + offset + c - kNope));
          x = pe * (is_fp8(pe_type) ? own_scale : 1.0f) / k_divide;
        } else {
          x = static_cast<float>(kv_up.at(row * 2 * kNope + (is_value ? c - kHeadDim + kNope : c))) /
              (is_value ? v_divide : k_divide);
        }
        const uint32_t wanted = encode(output, to_fp8 && p.saturate ? saturated(output, x) : x);
        const uint32_t got = is_value ? v.code(row * kNope + c - kHeadDim) : k.code(row * kHeadDim + c);
        report.expect(wanted == got, std::string("pack_kv ") + name_of(input) + ", rope " + name_of(pe_type) + ", to " +
                                         name_of(output) + " column " + std::to_string(c) + " is " +
                                         std::to_string(got) + ", expected " + std::to_string(wanted));
      }
    }
  }
  report.group("pack_kv");
}

// ---- gather_context

// A cache of any layout, as bytes of exactly its size, with values that are written down here.
struct ContextCache {
  bool ds_mla;
  Array values;            // [layers, slots, D] in its dtype; where ds_mla what the bytes stand for, in fp32
  Buffer<uint8_t> packed;  // where ds_mla

  ContextCache(bool ds_mla, DType type, int64_t rows, Random& random)
      : ds_mla(ds_mla), values(ds_mla ? DType::kF32 : type, rows * kWidth) {
    if (!ds_mla) values.fill_random(random, 0, values.count());
    if (!ds_mla) return;
    packed.resize(rows * kDsMlaBytes);
    for (int64_t row = 0; row < rows; ++row) {
      uint8_t* const bytes = packed.data() + row * kDsMlaBytes;
      for (int c = 0; c < kWidth; ++c) {
        double value;
        if (c < kLatent) {
          const float scale = std::ldexp(1.0f + static_cast<float>((row + c / kDsMlaGroup) % 5) / 7, -3);
          std::memcpy(bytes + kLatent + c / kDsMlaGroup * 4, &scale, 4);
          bytes[c] = static_cast<uint8_t>(encode(DType::kE4M3FN, pick(random, -300, 300)));
          value = static_cast<float>(value_of(DType::kE4M3FN, bytes[c])) * scale;
        } else {
          const auto code = static_cast<uint16_t>(encode(DType::kBF16, pick(random, -999, 999) / 700.0));
          std::memcpy(bytes + kLatent + 16 + (c - kLatent) * 2, &code, 2);
          value = value_of(DType::kBF16, code);
        }
        values.set(row * kWidth + c, value);
      }
    }
  }

  const void* data() { return ds_mla ? static_cast<const void*>(packed.data()) : values.data(); }
};

inline void test_gather_context() {
  Random random(13);
  const auto odd = [&] { return choose(random, {INT32_MIN, -1, INT32_MAX, pick(random, 0, 40)}); };
  for (int i = 0; i < (quick ? 30 : 150); ++i) {
    const bool ds_mla = pick(random, 0, 3) == 0, garbage = pick(random, 0, 3) == 0;
    const DType type = choose(random, {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3FN, DType::kE4M3FNUZ});
    const DType output = choose(random, {DType::kBF16, DType::kF16, DType::kF32});
    const int pages = 5, page_size = choose(random, {1, 4, 16}), layers = choose(random, {1, 2}), max_pages = 3,
              batch = pick(random, 1, 4), rows = pick(random, 1, 150);
    const int64_t slots = int64_t{pages} * page_size;
    ContextCache cache(ds_mla, type, layers * slots, random);
    Array latent(output, int64_t{rows} * kLatent), rope(output, int64_t{rows} * kRope);
    Buffer<int32_t> table, starts, cu = {0};
    for (int j = 0; j < batch * max_pages; ++j)
      table.push_back(pick(random, 0, 4) ? pick(random, 0, pages - 1) : odd());
    for (int b = 0; b < batch; ++b) {
      starts.push_back(garbage ? odd() : pick(random, 0, max_pages - 1) * page_size);
      cu.push_back(garbage ? odd() : std::min(cu.back() + pick(random, 0, 2 * page_size), rows));
    }
    Scalar<int32_t> layer(choose(random, {0, layers - 1, layers, -1, INT32_MAX}));
    Buffer<float> scales{2.0f, 0.375f};
    const bool scaled = !ds_mla && is_fp8(type);
    GatherContextParams p{};
    p.cache = cache.data();
    p.layer = layer.data();
    p.k_scale = scaled ? scales.data() : nullptr;
    p.page_table = table.data();
    p.starts = starts.data();
    p.cu_kv_lens = cu.data();
    p.latent = latent.data();
    p.rope = rope.data();
    p.pages = pages;
    p.rows = rows;
    p.layers = layers;
    p.page_size = page_size;
    p.max_pages = max_pages;
    p.batch = batch;
    p.k_scales = scaled ? layers : 0;
    p.ds_mla = ds_mla;
    p.cache_dtype = ds_mla ? DType::kE4M3FN : type;
    p.output_dtype = output;
    report.expect_success(gather_context(p, device_with(pick(random, 1, 4))));
    for (int w = 0; w < rows; ++w) {
      int b = 0;
      while (b < batch && w >= cu[b + 1]) ++b;
      int64_t slot = -1;
      if (b < batch && w >= cu[b] && layer >= 0 && layer < layers) {
        const int64_t token = int64_t{starts[b]} + w - cu[b], page = token / page_size;
        const int32_t id = token < 0 || page >= max_pages ? -1 : table[b * max_pages + page];
        if (id >= 0 && id < pages) slot = layer * slots + int64_t{id} * page_size + token % page_size;
      }
      for (int c = 0; c < kWidth; ++c) {
        double wanted = 0;
        if (slot >= 0) wanted = cache.values.at(slot * kWidth + c);
        if (scaled) wanted = static_cast<float>(wanted) * scales[layers > 1 ? std::max<int32_t>(layer, 0) % 2 : 0];
        const uint32_t got =
            c < kLatent ? latent.code(int64_t{w} * kLatent + c) : rope.code(int64_t{w} * kRope + c - kLatent);
        report.expect(encode(output, wanted) == got,
                      "gather_context " + std::string(ds_mla ? "ds_mla" : name_of(type)) + " to " + name_of(output) +
                          " row " + std::to_string(w) + " column " + std::to_string(c));
      }
    }
  }
  report.group("gather_context");
}

}  // namespace mla::test
