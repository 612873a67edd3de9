// The driver's groups for update_cache, the fp8 casts and merge_states.
#pragma once

#include <cmath>

#include "tests/native/cuda_support.h"

namespace mla::test {

// --- update_cache

struct UpdateShapes {
  int32_t tokens;
  int32_t layers, layer;
  int32_t pages, page_size;
  int32_t distinct;  // slots are drawn from so many, so that tokens share them
  bool hash;
};

// The scratch of the search for duplicates, with what may lie there from before: anything, or other tokens' claims.
inline std::vector<int32_t> owners_of(int32_t tokens, Random& random) {
  size_t owner_slots = 1;
  while (owner_slots < size_t{2} * tokens) owner_slots *= 2;
  std::vector<int32_t> owners(2 * owner_slots);
  const bool claims = pick(random, 0, 1);
  for (int32_t& owner : owners) owner = claims ? pick(random, 0, tokens - 1) : pick(random, INT32_MIN, INT32_MAX);
  return owners;
}

// Copies of one dtype, compared bit for bit with the last of each slot's tokens; all else stays as it was.
template <class Element>
void check_update(const UpdateShapes& s, uint32_t seed) {
  Random random(seed);
  const int64_t slots = int64_t{s.pages} * s.page_size;
  std::vector<int32_t> mapping(s.tokens);
  const int32_t outside[] = {-1, static_cast<int32_t>(slots), 0x7FFFFFFF, -0x7FFFFFFF - 1};
  for (int32_t& slot : mapping) {
    slot = pick(random, 0, 9) == 0 ? outside[pick(random, 0, 3)]
                                   : pick(random, slots - std::min<int64_t>(s.distinct, slots), slots - 1);
  }
  Array<Element> cache(s.layers * slots * kWidth), kv_c(int64_t{s.tokens} * kLatent), k_pe(int64_t{s.tokens} * kRope);
  fill(cache.data(), cache.size(), seed);
  fill(kv_c.data(), kv_c.size(), seed + 1);
  fill(k_pe.data(), k_pe.size(), seed + 2);
  const Array<int32_t> slot_mapping(mapping), layer(std::vector<int32_t>{s.layer});
  const std::vector<int32_t> scratch = owners_of(s.tokens, random);
  Array<int32_t> owners(scratch);

  std::vector<Element> expected = cache.download();
  const std::vector<Element> latents = kv_c.download(), ropes = k_pe.download();
  for (int32_t t = 0; t < s.tokens; ++t) {
    if (mapping[t] < 0 || mapping[t] >= slots || s.layer < 0 || s.layer >= s.layers) continue;
    Element* target = expected.data() + (s.layer * slots + mapping[t]) * kWidth;
    std::memcpy(target, latents.data() + int64_t{t} * kLatent, kLatent * sizeof(Element));
    std::memcpy(target + kLatent, ropes.data() + int64_t{t} * kRope, kRope * sizeof(Element));
  }

  UpdateCacheParams p{};
  p.cache = cache.data();
  p.kv_c = kv_c.data();
  p.k_pe = k_pe.data();
  p.slot_mapping = slot_mapping.data();
  p.layer = s.layers == 1 && s.layer == 0 ? nullptr : layer.data();
  p.owners = s.hash ? owners.data() : nullptr;
  p.owner_slots = s.hash ? static_cast<int32_t>(scratch.size() / 2) : 0;
  p.pages = s.pages;
  p.layers = s.layers;
  p.page_size = s.page_size;
  p.tokens = s.tokens;
  p.input_dtype = p.cache_dtype = dtype_of<Element>();
  for (int call = 0; call < 2; ++call) check(update_cache(p, device()));  // the second finds the table of the first
  require(same_bits(cache.download(), expected), "update_cache of " + std::to_string(s.tokens) + " tokens, " +
                                                     std::to_string(sizeof(Element)) + " bytes an element, layer " +
                                                     std::to_string(s.layer) + (s.hash ? ", by hash" : ", by scan"));
}

inline std::string update_group(bool quick) {
  int count = 0;
  auto both = [&](const UpdateShapes& s) {
    check_update<__nv_bfloat16>(s, 10 + count);
    check_update<__half>(s, 11 + count);
    check_update<float>(s, 12 + count);
    ++count;
  };
  for (bool hash : {false, true}) {
    both({5, 1, 0, 4, 4, 4, hash});
    both({1, 2, 1, 3, 7, 100, hash});
    both({33, 2, 2, 3, 7, 100, hash});
    both({33, 1, -1, 3, 7, 100, hash});
    if (quick) continue;
    both({2000, 2, 1, 40, 64, 700, hash});
    both({2000, 1, 0, 40, 64, 1, hash});
    both({2000, 1, 0, 40, 64, 2560, hash});
  }
  if (!quick) {
    both({20000, 1, 0, 200, 64, 3000, true});
    both({20000, 1, 0, 400, 64, 25600, true});
    both({20000, 1, 0, 200, 64, 5, true});
  }
  return std::to_string(3 * count) + " updates";
}

// --- Casts to e4m3fn, against a search through all 256 values.

inline double e4m3fn_value(int bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const double magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return bits & 0x80 ? -magnitude : magnitude;
}

// Round to nearest, ties to the even code; 480 stands where NaN is, so that what would round to it is NaN.
inline uint8_t e4m3fn_rule(float x, bool saturate) {
  if (std::isnan(x)) return 0x7F;
  const int sign = std::signbit(x) ? 0x80 : 0;
  double magnitude = std::fabs(double{x});
  if (saturate) magnitude = std::min(magnitude, 448.0);
  if (magnitude >= 480) return 0x7F;
  int best = 0;
  double best_distance = INFINITY;
  for (int code = 0; code <= 0x7F; ++code) {
    const double distance = std::fabs((code == 0x7F ? 480 : e4m3fn_value(code)) - magnitude);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) {
      best = code;
      best_distance = distance;
    }
  }
  return static_cast<uint8_t>(best == 0x7F ? 0x7F : best | sign);
}

template <class Element>
void check_casts(const std::vector<Element>& inputs, float scale, bool saturate) {
  constexpr int kTokens = 114;  // of 576 values: all of 65,536, some twice
  std::vector<Element> latents(kTokens * kLatent), ropes(kTokens * kRope);
  std::vector<uint8_t> expected(kTokens * kWidth);
  for (int i = 0; i < kTokens * kWidth; ++i) {
    const Element x = inputs[i % inputs.size()];
    const int token = i / kWidth, column = i % kWidth;
    (column < kLatent ? latents[token * kLatent + column] : ropes[token * kRope + column - kLatent]) = x;
    const float scaled = host_float(x) / scale;
    expected[i] = e4m3fn_rule(scaled, saturate);
  }
  std::vector<int32_t> mapping(kTokens);
  for (int i = 0; i < kTokens; ++i) mapping[i] = i;
  const Array<Element> kv_c(latents), k_pe(ropes);
  const Array<int32_t> slot_mapping(mapping);
  const Array<float> scales(std::vector<float>{scale});
  Array<uint8_t> cache(kTokens * kWidth);
  UpdateCacheParams p{};
  p.cache = cache.data();
  p.kv_c = kv_c.data();
  p.k_pe = k_pe.data();
  p.slot_mapping = slot_mapping.data();
  p.k_scale = scale == 1 ? nullptr : scales.data();
  p.k_scales = 1;
  p.pages = kTokens;
  p.layers = 1;
  p.page_size = 1;
  p.tokens = kTokens;
  p.saturate = saturate;
  p.input_dtype = dtype_of<Element>();
  p.cache_dtype = DType::kE4M3FN;
  check(update_cache(p, device()));
  const std::vector<uint8_t> actual = cache.download();
  for (size_t i = 0; i < actual.size(); ++i) {
    const bool nan = (actual[i] & 0x7F) == 0x7F && expected[i] == 0x7F;  // of either sign
    require(nan || actual[i] == expected[i],
            "cast of " + std::to_string(host_float(inputs[i % inputs.size()])) + " / " + std::to_string(scale) +
                " to e4m3fn: " + std::to_string(actual[i]) + ", expected " + std::to_string(expected[i]));
  }
}

inline std::string cast_group(bool) {
  std::vector<__nv_bfloat16> bf16(65536);
  std::vector<__half> f16(65536);
  std::vector<float> f32(65536);
  for (uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    std::memcpy(&bf16[i], &bits, 2);
    std::memcpy(&f16[i], &bits, 2);
    const uint32_t wide = i < 32768 ? mix(i) : 0x3A000000u + (i - 32768) * 0x6000u;  // anything; 2^-11 and up
    std::memcpy(&f32[i], &wide, 4);
  }
  int count = 0;
  for (bool saturate : {false, true}) {
    for (float scale : {1.0f, 0.37f}) {
      check_casts(bf16, scale, saturate);
      check_casts(f16, scale, saturate);
      check_casts(f32, scale, saturate);
      count += 3;
    }
  }
  return std::to_string(count) + " x 65536 values";
}

// --- fp8_ds_mla, bit for bit by the layout's rule; of NaN any.

template <class Element>
void check_ds_mla_update(int32_t tokens, int32_t distinct, bool hash, bool power_of_two, uint32_t seed) {
  Random random(seed);
  const int64_t slots = distinct + 7;
  std::vector<Element> latents(int64_t{tokens} * kLatent), ropes(int64_t{tokens} * kRope);
  for (int32_t t = 0; t < tokens; ++t) {
    const float size =
        std::ldexp(1.0f, std::is_same_v<Element, __half> ? pick(random, -14, 10) : pick(random, -40, 40));
    for (int c = 0; c < kLatent; ++c) {
      const int kind = pick(random, 0, 200);
      const float special[] = {0, NAN, INFINITY, -INFINITY};
      const bool zeros = t % 5 == 0 && c < kDsMlaGroup;
      const float x = zeros ? 0 : kind < 4 && t % 3 == 0 ? special[kind] : pick(random, -1000, 1000) * 1e-3f * size;
      latents[int64_t{t} * kLatent + c] = host_element<Element>(x);
    }
    for (int c = 0; c < kRope; ++c)
      ropes[int64_t{t} * kRope + c] = host_element<Element>(pick(random, -99, 99) * 0.37f);
  }
  std::vector<int32_t> mapping(tokens);
  for (int32_t& slot : mapping) slot = pick(random, 0, 9) == 0 ? -1 : pick(random, 0, distinct - 1);
  std::vector<uint8_t> expected(slots * kDsMlaBytes, 0xA5);
  for (int32_t t = 0; t < tokens; ++t) {
    if (mapping[t] < 0) continue;
    uint8_t* const row = expected.data() + int64_t{mapping[t]} * kDsMlaBytes;
    for (int group = 0; group < kLatent / kDsMlaGroup; ++group) {
      const Element* const first = latents.data() + int64_t{t} * kLatent + group * kDsMlaGroup;
      float largest = 0;
      for (int c = 0; c < kDsMlaGroup; ++c) {
        const float magnitude = std::fabs(host_float(first[c]));
        if (std::isfinite(magnitude)) largest = std::max(largest, magnitude);
      }
      float scale = std::max(largest, 1e-4f) / 448.0f;
      if (power_of_two) {
        int exponent = 0;
        const float fraction = std::frexp(scale, &exponent);
        scale = std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
      }
      std::memcpy(row + kLatent + group * 4, &scale, sizeof(scale));
      for (int c = 0; c < kDsMlaGroup; ++c) {
        row[group * kDsMlaGroup + c] = e4m3fn_rule(host_float(first[c]) / scale, /*saturate=*/false);
      }
    }
    for (int c = 0; c < kRope; ++c) {
      const auto x = host_element<__nv_bfloat16>(host_float(ropes[int64_t{t} * kRope + c]));
      std::memcpy(row + kDsMlaBytes - kRope * 2 + c * 2, &x, 2);
    }
  }

  const Array<Element> kv_c(latents), k_pe(ropes);
  const Array<int32_t> slot_mapping(mapping);
  Array<uint8_t> cache(std::vector<uint8_t>(slots * kDsMlaBytes, 0xA5));
  const std::vector<int32_t> scratch = owners_of(tokens, random);
  Array<int32_t> owners(scratch);
  UpdateCacheParams p{};
  p.cache = cache.data();
  p.kv_c = kv_c.data();
  p.k_pe = k_pe.data();
  p.slot_mapping = slot_mapping.data();
  p.owners = hash ? owners.data() : nullptr;
  p.owner_slots = hash ? static_cast<int32_t>(scratch.size() / 2) : 0;
  p.pages = slots;
  p.layers = p.page_size = 1;
  p.tokens = tokens;
  p.ds_mla = true;
  p.power_of_two_scales = power_of_two;
  p.input_dtype = dtype_of<Element>();
  p.cache_dtype = DType::kE4M3FN;
  check(update_cache(p, device()));
  const std::vector<uint8_t> stored = cache.download();
  for (size_t i = 0; i < stored.size(); ++i) {
    const bool nan = i % kDsMlaBytes < kLatent && (stored[i] & 0x7F) == 0x7F && (expected[i] & 0x7F) == 0x7F;
    require(stored[i] == expected[i] || nan, "fp8_ds_mla: byte " + std::to_string(i % kDsMlaBytes) + " of slot " +
                                                 std::to_string(i / kDsMlaBytes) + " is " + std::to_string(stored[i]));
  }
}

inline std::string update_ds_mla_group(bool quick) {
  for (bool hash : {false, true}) {
    for (bool power_of_two : {false, true}) {
      for (int32_t tokens : {1, 40, 3000}) {
        if (quick && tokens > 100) continue;
        check_ds_mla_update<__nv_bfloat16>(tokens, tokens, hash, power_of_two, 20);
        check_ds_mla_update<__half>(tokens, tokens / 3 + 1, hash, power_of_two, 21);
        check_ds_mla_update<float>(tokens, tokens, hash, power_of_two, 22);
      }
    }
  }
  return {};
}

// --- merge_states

template <class Element>
void check_merge(int64_t rows, int32_t width, uint64_t seed) {
  std::vector<float> lse_a(rows), lse_b(rows);
  std::vector<Element> out_a(rows * width), out_b(rows * width);
  const float special[] = {-INFINITY, INFINITY, NAN};
  for (int64_t row = 0; row < rows; ++row) {
    lse_a[row] = row % 5 == 1 || row % 5 == 3 ? special[row / 5 % 3] : 3 * noise(seed, row);
    lse_b[row] = row % 5 == 2 || row % 5 == 3 ? special[row / 15 % 3] : 3 * noise(seed + 1, row);
    for (int32_t c = 0; c < width; ++c) {
      const int64_t i = row * width + c;
      out_a[i] = host_element<Element>(std::isfinite(lse_a[row]) ? noise(seed + 2, i) : NAN);
      out_b[i] = host_element<Element>(std::isfinite(lse_b[row]) ? noise(seed + 3, i) : NAN);
    }
  }
  const Array<float> device_lse_a(lse_a), device_lse_b(lse_b);
  const Array<Element> device_out_a(out_a), device_out_b(out_b);
  Array<Element> out(rows * width);
  Array<float> lse(rows);
  MergeStatesParams p{device_out_a.data(),
                      device_lse_a.data(),
                      device_out_b.data(),
                      device_lse_b.data(),
                      out.data(),
                      lse.data(),
                      rows,
                      width,
                      dtype_of<Element>()};
  check(merge_states(p, device()));
  const std::vector<Element> merged = out.download();
  const std::vector<float> merged_lse = lse.download();
  for (int64_t row = 0; row < rows; ++row) {
    const std::string where = "merge_states, row " + std::to_string(row) + " of width " + std::to_string(width);
    const double a = std::isfinite(lse_a[row]) ? std::exp(double{lse_a[row]}) : 0;
    const double b = std::isfinite(lse_b[row]) ? std::exp(double{lse_b[row]}) : 0;
    if (a + b == 0)
      require(merged_lse[row] == -INFINITY, where + ": lse of an empty row");
    else
      require(std::fabs(merged_lse[row] - std::log(a + b)) < 1e-5, where + ": lse");
    for (int32_t c = 0; c < width; ++c) {
      const int64_t i = row * width + c;
      double expected = 0;
      if (a > 0) expected += a / (a + b) * double{host_float(out_a[i])};
      if (b > 0) expected += b / (a + b) * double{host_float(out_b[i])};
      const double error = std::fabs(double{host_float(merged[i])} - expected);
      require(error <= tolerance<Element>() * (std::fabs(expected) + 0.1), where + ": out");
      if (a == 0 || b == 0) {
        const Element& only = a > 0 ? out_a[i] : out_b[i];
        const bool exact = a + b == 0 ? host_float(merged[i]) == 0 : host_float(merged[i]) == host_float(only);
        require(exact, where + ": with one side empty, the other has to pass unchanged");
      }
    }
  }
}

inline std::string merge_group(bool quick) {
  int count = 0;
  for (int64_t rows : {1, 31, quick ? 64 : 3072}) {
    for (int32_t width : {128, 512, 13, 2056}) {
      check_merge<__nv_bfloat16>(rows, width, 20 + count);
      check_merge<__half>(rows, width, 30 + count);
      check_merge<float>(rows, width, 40 + count);
      count += 3;
    }
  }
  return std::to_string(count) + " merges";
}

}  // namespace mla::test
