// Tests the CPU kernels without XLA and Python, against float64. Exits with 1 on any disagreement.
//   cpu_driver            all groups, under a minute
//   cpu_driver --quick    fewer cases, for sanitizers
//   cpu_driver --time     milliseconds and GB/s of decode, for each variant
#include <cctype>
#include <chrono>
#include <cstdio>

#include "kernels/capability.h"
#include "tests/native/decode_case.h"

namespace mla::test {
namespace {

Report report;
bool quick = false;

std::vector<int> variants_here() {
  std::vector<int> here;
  const auto names = variants();
  for (size_t i = 0; i < names.size(); ++i) {
    for (const auto& row : capabilities()) {
      if (std::string(row.variant) == names[i] && std::string(row.operation) == "mla_decode") {
        here.push_back(static_cast<int>(i) + 1);
        break;
      }
    }
  }
  return here;
}

struct TypePair {
  DType q, cache;
};

constexpr TypePair kTypePairs[] = {
    {DType::kBF16, DType::kBF16},     {DType::kF16, DType::kF16},     {DType::kF32, DType::kF32},
    {DType::kBF16, DType::kE4M3FN},   {DType::kBF16, DType::kE4M3FNUZ}, {DType::kF16, DType::kE4M3FN},
    {DType::kF16, DType::kE4M3FNUZ}, {DType::kE4M3FN, DType::kE4M3FN}, {DType::kE4M3FNUZ, DType::kE4M3FNUZ},
};

bool is_fp8(DType type) { return size_of(type) == 1; }

double out_tolerance(DType q) { return q == DType::kF32 ? 1e-5 : q == DType::kF16 ? 1e-3 : 1e-2; }
double lse_tolerance(DType q) { return q == DType::kF32 ? 2e-5 : 1e-3; }

void check_decode(DecodeCase& problem, const Device& device, const char* what, double* worst) {
  const DecodeShape& s = problem.shape;
  Error error = problem.make_plan(device);
  if (error.empty()) error = problem.run(device);
  if (error.empty()) error = problem.compare(out_tolerance(s.q_type), lse_tolerance(s.q_type), worst);
  report.expect(error.empty(), std::string(what) + ": " + error + " [" + s.text() + "]");
}

DecodeShape random_shape(Random& random, int variant, TypePair types) {
  DecodeShape s;
  s.variant = variant;
  s.q_type = types.q;
  s.cache_type = types.cache;
  s.heads = choose(random, {1, 2, 4, 8, 12, 17, 24, 31, 96, 128, 144});
  s.page_size = choose(random, {1, 4, 16, 48, 64});
  s.max_q_len = s.heads > 90 ? choose(random, {1, 2}) : choose(random, {1, 2, 4});
  s.tile_rows = choose(random, {16, 32, 64, 128, 256});
  s.parts = choose(random, {1, 3, 8});
  s.causal = pick(random, 0, 3) > 0;
  s.pair = pick(random, 0, 1) == 1;
  s.batch_invariant = pick(random, 0, 3) == 0;
  s.scales = pick(random, 0, 1) == 1;
  s.layers = choose(random, {1, 1, 3});
  s.layer = pick(random, 0, s.layers - 1);
  s.ragged = pick(random, 0, 1) == 1;
  const int batch = pick(random, 1, 3);
  for (int b = 0; b < batch; ++b) {
    s.kv_lens.push_back(choose(random, {0, 1, 2, 3, 13, 63, 64, 65, pick(random, 1, 200), pick(random, 60, 280)}));
    s.q_lens.push_back(s.ragged ? pick(random, 0, s.max_q_len) : s.max_q_len);
  }
  s.extra_tokens = s.ragged ? pick(random, 0, 2) : 0;
  if (s.ragged && s.extra_tokens == 0) s.q_lens[0] = std::max(s.q_lens[0], 1);
  return s;
}

void test_decode_sweep(const Device& device) {
  Random random(1);
  for (int variant : variants_here()) {
    for (const TypePair& types : kTypePairs) {
      double worst = 0;
      const int cases = quick ? 3 : 10;
      for (int i = 0; i < cases; ++i) {
        DecodeCase problem(random_shape(random, variant, types), random);
        check_decode(problem, device, "decode", &worst);
      }
      char detail[64];
      std::snprintf(detail, sizeof(detail), "worst relative error %.1e", worst);
      report.group(std::string("decode ") + variants()[variant - 1] + " " + name_of(types.q) + "/" + name_of(types.cache), detail);
    }
  }
}

void test_decode_heads(const Device& device) {
  Random random(2);
  double worst = 0;
  for (int variant : variants_here()) {
    for (int heads = quick ? variant : 1; heads <= 128; heads += quick ? 13 : 1) {
      DecodeShape s;
      s.variant = variant;
      s.heads = heads;
      s.tile_rows = choose(random, {16, 32, 64, 128});
      s.page_size = 16;
      s.kv_lens = std::vector<int>{19, 1};
      DecodeCase problem(s, random);
      check_decode(problem, device, "heads", &worst);
    }
  }
  report.group("decode, every head count to 128");
}

void test_bad_values(const Device& device) {
  Random random(3);
  double worst = 0;
  for (int variant : variants_here()) {
    for (const TypePair& types : {kTypePairs[0], kTypePairs[2], kTypePairs[3]}) {
      DecodeShape s;
      s.variant = variant;
      s.q_type = types.q;
      s.cache_type = types.cache;
      s.heads = 12;
      s.page_size = 16;
      s.max_q_len = 2;
      s.kv_lens = std::vector<int>{0, -1, INT32_MIN, 40, 1000, 70, INT32_MAX};

      DecodeCase past_the_table(s, random, /*table_pages=*/5);
      check_decode(past_the_table, device, "lengths", &worst);

      DecodeCase bad_pages(s, random, 5);
      for (int b = 3; b < s.batch(); ++b) {
        bad_pages.page_table[b * 5 + pick(random, 0, 4)] = choose(random, {-1, INT32_MIN, INT32_MAX, bad_pages.pages});
      }
      check_decode(bad_pages, device, "page ids", &worst);

      for (int layer : {-1, 3, INT32_MIN, INT32_MAX}) {
        DecodeShape stacked = s;
        stacked.layers = 3;
        stacked.layer = layer;
        DecodeCase bad_layer(stacked, random, 5);
        check_decode(bad_layer, device, "layer", &worst);
      }

      // Only that nothing outside the arrays is touched, which a sanitizer sees.
      for (int i = 0; i < (quick ? 10 : 60); ++i) {
        DecodeCase garbage(random_shape(random, variant, types), random);
        garbage.make_plan(device);
        const auto any = [&] { return choose(random, {static_cast<int>(random()), pick(random, -2, 4), pick(random, -70, 300)}); };
        const auto spoil = [&](void* data, size_t count) {
          for (size_t j = 0; j < count; ++j) {
            const int value = any();
            if (pick(random, 0, 2) == 0) std::memcpy(static_cast<char*>(data) + j * 4, &value, 4);
          }
        };
        spoil(garbage.items.data(), garbage.items.size() * 8);
        spoil(garbage.splits.data(), garbage.splits.size() * 2);
        spoil(garbage.part_offsets.data(), garbage.part_offsets.size());
        if (i % 2 == 0) spoil(garbage.cu_q_lens.data(), garbage.cu_q_lens.size());
        if (i % 3 == 0) spoil(garbage.kv_lens.data(), garbage.kv_lens.size());
        if (i % 5 == 0) spoil(garbage.page_table.data(), garbage.page_table.size());
        const Error error = garbage.run(device_with(1));  // items of a garbage plan may name the same rows
        report.expect(error.empty(), "garbage plan: " + error);
        if (i % 2 == 0) garbage.make_plan(device_with(1));
      }
    }
  }
  report.group("decode, values out of bounds");
}

// NaN in the newest token's row reaches the newest query alone.
void test_hidden_nan(const Device& device) {
  Random random(4);
  for (int variant : variants_here()) {
    for (const TypePair& types : {kTypePairs[0], kTypePairs[2], kTypePairs[3]}) {
      for (int kv_len : {4, 61, 64, 65, 66, 128, 130}) {
        DecodeShape s;
        s.variant = variant;
        s.q_type = types.q;
        s.cache_type = types.cache;
        s.heads = 12;
        s.max_q_len = 4;
        s.tile_rows = 64;
        s.kv_lens.assign(1, kv_len);
        s.parts = 1;
        DecodeCase problem(s, random);
        problem.make_plan(device);
        problem.run(device);
        const Array clean = problem.out;
        const std::vector<float> clean_lse = problem.lse;
        const int64_t slot = problem.slot_of(0, kv_len - 1);
        for (int c = 0; c < kWidth; ++c) problem.cache.set_code(slot * kWidth + c, nan_code(s.cache_type));
        problem.run(device);
        const size_t hidden = size_t{3} * 12;
        const bool same = std::memcmp(clean.bytes.data(), problem.out.data(), hidden * kLatent * size_of(clean.type)) == 0 &&
                          std::memcmp(clean_lse.data(), problem.lse.data(), hidden * sizeof(float)) == 0;
        report.expect(same, "a query changed with a token that it does not see: " + s.text());
        report.expect(std::isnan(problem.out.at(hidden * kLatent)), "NaN was lost for the query that sees it: " + s.text());
      }
    }
  }
  report.group("decode, NaN behind the causal limit");
}

void test_determinism() {
  Random random(5);
  for (int variant : variants_here()) {
    for (const TypePair& types : kTypePairs) {
      for (int i = 0; i < (quick ? 1 : 3); ++i) {
        DecodeCase problem(random_shape(random, variant, types), random);
        problem.make_plan(device_with(1));
        problem.run(device_with(1));
        const Array out = problem.out;
        const std::vector<float> lse = problem.lse;
        for (int threads : {2, 3, 5, 2}) {
          problem.run(device_with(threads));
          report.expect(out.bytes == problem.out.bytes && std::memcmp(lse.data(), problem.lse.data(), lse.size() * 4) == 0,
                        "other bits with " + std::to_string(threads) + " threads: " + problem.shape.text());
        }
      }
    }
  }
  report.group("decode, same bits again");
}

void test_batch_invariance(const Device& device) {
  Random random(6);
  for (int variant : variants_here()) {
    for (const TypePair& types : {kTypePairs[0], kTypePairs[2], kTypePairs[3]}) {
      DecodeShape s;
      s.variant = variant;
      s.q_type = types.q;
      s.cache_type = types.cache;
      s.heads = 4;
      s.max_q_len = 2;
      s.tile_rows = 16;
      s.batch_invariant = true;
      s.kv_lens = std::vector<int>{5, 300, quick ? 100 : 2500, 4100};
      DecodeCase together(s, random);
      together.make_plan(device);
      together.run(device);
      const int64_t rows = int64_t{s.max_q_len} * s.heads;
      for (int b = 0; b < s.batch(); ++b) {
        DecodeShape alone_shape = s;
        alone_shape.kv_lens.assign(1, s.kv_lens[b]);
        alone_shape.parts = 1 + b;
        DecodeCase alone(alone_shape, random);
        alone.cache = together.cache;
        alone.pages = together.pages;
        alone.max_pages = together.max_pages;
        alone.page_table.assign(together.page_table.begin() + b * together.max_pages,
                                together.page_table.begin() + (b + 1) * together.max_pages);
        const int64_t q_bytes = rows * kWidth * size_of(s.q_type), out_bytes = rows * kLatent * size_of(together.out.type);
        std::memcpy(alone.q.data(), together.q.bytes.data() + b * q_bytes, q_bytes);
        alone.make_plan(device);
        alone.run(device);
        report.expect(std::memcmp(alone.out.data(), together.out.bytes.data() + b * out_bytes, out_bytes) == 0 &&
                          std::memcmp(alone.lse.data(), together.lse.data() + b * rows, rows * sizeof(float)) == 0,
                      "alone differs from in the batch: " + alone_shape.text());
      }
    }
  }
  report.group("decode, batch invariance");
}

void test_plan() {
  Random random(7);
  for (int i = 0; i < (quick ? 100 : 500); ++i) {
    DecodeShape s = random_shape(random, 0, kTypePairs[0]);
    s.heads = choose(random, {1, 24, 31});
    s.page_size = 1;
    s.layers = 1;
    s.layer = 0;
    s.parts = pick(random, 1, 40);
    DecodeCase problem(s, random);
    problem.kv_lens[0] = choose(random, {problem.kv_lens[0], 100000, INT32_MAX, -5});
    problem.make_plan(device_with(1));
    std::string wrong;
    const int count = problem.part_offsets[s.parts];
    if (problem.part_offsets[0] != 0) wrong = "the first offset is not 0";
    std::vector<int64_t> reached(problem.splits.size(), 0);
    std::vector<int> pieces(problem.splits.size(), 0);
    std::vector<int> next_slots;
    for (int k = 0; k < count; ++k) {
      const WorkItem& item = problem.items[k];
      const int tile = item.request * problem.row_tiles + item.row_tile;
      if (item.kv_begin != reached[tile] || item.kv_end <= item.kv_begin) wrong = "pieces of a tile do not follow each other";
      if (item.kv_begin % kBlockTokens != 0) wrong = "a piece begins inside a block";
      reached[tile] = item.kv_end;
      const int slot = problem.splits[tile].count < 2 ? -1 : problem.splits[tile].first_partial + pieces[tile];
      if (item.partial != slot) wrong = "partial slots are not numbered in order";
      ++pieces[tile];
    }
    int next_partial = 0;
    for (size_t tile = 0; tile < problem.splits.size(); ++tile) {
      const int b = static_cast<int>(tile) / problem.row_tiles;
      const int n = query_count(s.ragged ? problem.cu_q_lens.data() : nullptr, b, s.max_q_len);
      const int64_t first_row = int64_t{static_cast<int>(tile) % problem.row_tiles} * s.tile_rows;
      const int64_t length = first_row < int64_t{n} * s.heads ? std::max(problem.kv_lens[b], 0) : 0;
      const TileSplits& split = problem.splits[tile];
      if (reached[tile] != length) wrong = "a tile is not covered";
      if (split.count != pieces[tile]) wrong = "a tile's count differs from its items";
      if (split.first_partial != (split.count < 2 ? -1 : next_partial)) wrong = "first_partial is not the sum before it";
      if (split.count >= 2) next_partial += split.count;
    }
    if (next_partial > problem.plan().max_partials) wrong = "more partials than fit";
    for (int part = 0; part < s.parts; ++part) {
      if (problem.part_offsets[part] > problem.part_offsets[part + 1]) wrong = "offsets descend";
    }
    const WorkItem zero = {};
    for (size_t k = count; k < problem.items.size(); ++k) {
      if (std::memcmp(&problem.items[k], &zero, sizeof(zero)) != 0) wrong = "an unused item is not zero";
    }
    report.expect(wrong.empty(), wrong + ": " + s.text());
  }
  report.group("plan_decode");
}

void test_variants(const Device& device) {
  Random random(8);
  DecodeShape s;
  s.kv_lens.push_back(5);
  const auto here = variants_here();
  for (int variant = -1; variant <= static_cast<int>(variants().size()) + 1; ++variant) {
    s.variant = variant;
    DecodeCase problem(s, random);
    problem.make_plan(device);
    const Error error = problem.run(device);
    const bool runs = variant == 0 || std::find(here.begin(), here.end(), variant) != here.end();
    report.expect(error.empty() == runs, "variant " + std::to_string(variant) + " gave '" + error + "'");
    if (!runs) report.expect(error.find(variant < 1 || variant > 5 ? "variant is" : "cannot run") != Error::npos, error);
  }
  std::string names;
  for (int variant : here) names += std::string(" ") + variants()[variant - 1];
  report.group("variants", "this machine runs" + names);
}

// ---- update_cache

UpdateCacheParams update_params(Array& cache, Array& kv_c, Array& k_pe, const std::vector<int32_t>& slots, int page_size) {
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

bool same_but_nan_sign(DType type, uint32_t a, uint32_t b) {
  return a == b || (type == DType::kE4M3FN && (a & 0x7f) == 0x7f && (b & 0x7f) == 0x7f);
}

double saturated(DType type, double x) {
  const double largest = type == DType::kE4M3FN ? 448 : 240;
  return std::isnan(x) ? x : std::clamp(x, -largest, largest);
}

// Every bf16 and fp16 value, and fp32 values around every rounding boundary, through the cache's casts.
void test_casts(const Device& device) {
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
      std::vector<int32_t> slots;
      for (int32_t t = 0; t < tokens; ++t) {
        slots.push_back(t);
        for (int c = 0; c < kLatent; ++c) kv_c.set_code(int64_t{t} * kLatent + c, codes[t * kWidth + c]);
        for (int c = 0; c < kRope; ++c) k_pe.set_code(int64_t{t} * kRope + c, codes[t * kWidth + kLatent + c]);
      }
      for (float k_scale : {1.0f, 0.37f}) {
        for (bool saturate : {false, true}) {
          Array cache(target, int64_t{tokens} * kWidth);
          UpdateCacheParams p = update_params(cache, kv_c, k_pe, slots, 1);
          p.k_scale = &k_scale;
          p.k_scales = 1;
          p.saturate = saturate;
          update_cache(p, device);
          for (size_t i = 0; i < codes.size(); ++i) {
            const float scaled = static_cast<float>(value_of(source, codes[i])) / k_scale;
            const uint32_t wanted = encode(target, saturate ? saturated(target, scaled) : scaled);
            report.expect(same_but_nan_sign(target, wanted, cache.code(i)),
                          std::string(name_of(source)) + " " + std::to_string(codes[i]) + " to " + name_of(target) + " is " +
                              std::to_string(cache.code(i)) + ", expected " + std::to_string(wanted));
          }
        }
      }
    }
  }
  report.group("fp8 casts");
}

void test_update_cache() {
  Random random(9);
  for (int i = 0; i < (quick ? 10 : 60); ++i) {
    const DType cache_type = choose(random, {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3FN});
    const DType input = is_fp8(cache_type) ? choose(random, {DType::kBF16, DType::kF16, DType::kF32}) : cache_type;
    const int pages = 7, page_size = choose(random, {1, 4, 16}), layers = choose(random, {1, 2}), tokens = pick(random, 1, 150);
    const int64_t slots_per_layer = int64_t{pages} * page_size;
    Array cache(cache_type, layers * slots_per_layer * kWidth), kv_c(input, int64_t{tokens} * kLatent), k_pe(input, int64_t{tokens} * kRope);
    kv_c.fill_random(random, 0, kv_c.count());
    k_pe.fill_random(random, 0, k_pe.count());
    std::vector<int32_t> slots;
    for (int t = 0; t < tokens; ++t) {
      slots.push_back(choose(random, {pick(random, 0, static_cast<int>(slots_per_layer) - 1), pick(random, 0, 3), -1, INT32_MIN, INT32_MAX,
                                      static_cast<int>(slots_per_layer)}));
    }
    const int32_t layer = choose(random, {0, layers - 1, layers, -1, INT32_MAX});
    const float scales[2] = {1.0f, 0.5f};
    UpdateCacheParams p = update_params(cache, kv_c, k_pe, slots, page_size);
    p.pages = pages;
    p.layers = layers;
    p.layer = &layer;
    if (is_fp8(cache_type)) p.k_scale = scales;
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
    update_cache(p, device_with(pick(random, 1, 4)));
    report.expect(expected.bytes == cache.bytes, "update_cache " + std::string(name_of(input)) + " to " + name_of(cache_type));
  }
  report.group("update_cache");
}

// ---- merge_states and pack_kv

void test_merge_states() {
  Random random(10);
  for (int i = 0; i < (quick ? 30 : 100); ++i) {
    const DType type = choose(random, {DType::kBF16, DType::kF16, DType::kF32});
    const int rows = pick(random, 1, 90), width = choose(random, {1, 3, 128, 130, 512});
    Array a(type, int64_t{rows} * width), b = a, out = a;
    a.fill_random(random, 0, a.count());
    b.fill_random(random, 0, b.count());
    std::vector<float> lse_a, lse_b, lse(rows, kNaN);
    for (int row = 0; row < rows; ++row) {
      const auto any = [&] { return choose(random, {-kInfinity, kInfinity, kNaN, pick(random, -90, 90) / 10.0f, 0.5f, 1e5f}); };
      lse_a.push_back(any());
      lse_b.push_back(any());
      for (int c = 0; c < width; ++c) {  // an empty side is not read
        if (!std::isfinite(lse_a[row])) a.set_code(int64_t{row} * width + c, nan_code(type));
        if (!std::isfinite(lse_b[row])) b.set_code(int64_t{row} * width + c, nan_code(type));
      }
    }
    const MergeStatesParams p = {a.data(), lse_a.data(), b.data(), lse_b.data(), out.data(), lse.data(), rows, width, type};
    merge_states(p, device_with(3));
    for (int row = 0; row < rows; ++row) {
      const bool has_a = std::isfinite(lse_a[row]), has_b = std::isfinite(lse_b[row]);
      const double largest = std::max(has_a ? lse_a[row] : -kInfinity, has_b ? lse_b[row] : -kInfinity);
      const double wa = has_a ? std::exp(lse_a[row] - largest) : 0, wb = has_b ? std::exp(lse_b[row] - largest) : 0;
      const double wanted_lse = has_a || has_b ? largest + std::log(wa + wb) : -kInfinity;
      report.expect(lse[row] == wanted_lse || std::fabs(lse[row] - wanted_lse) <= 1e-5 + 1e-7 * std::fabs(wanted_lse), "merged lse");
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

void test_pack_kv() {
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
    const float k_scale = choose(random, {1.0f, 0.75f}), packed_k = choose(random, {1.0f, 0.3f}), packed_v = choose(random, {1.0f, 0.6f});
    PackKvParams p{};
    p.kv_up = kv_up.data();
    p.k_pe = k_pe.data();
    p.k_scale = is_fp8(pe_type) ? &k_scale : nullptr;
    p.packed_k_scale = to_fp8 ? &packed_k : nullptr;
    p.packed_v_scale = to_fp8 ? &packed_v : nullptr;
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
    pack_kv(p, device_with(3));
    const float k_divide = to_fp8 ? packed_k : 1.0f, v_divide = to_fp8 ? packed_v : 1.0f;
    for (int64_t row = 0; row < int64_t{tokens} * heads; ++row) {
      for (int c = 0; c < kHeadDim + kNope; ++c) {
        const bool is_value = c >= kHeadDim;
        if (is_value && !to_fp8) break;
        float x;
        if (c >= kNope && !is_value) {
          const auto pe = static_cast<float>(k_pe.at(row / heads * stride + offset + c - kNope));
          x = pe * (is_fp8(pe_type) ? k_scale : 1.0f) / k_divide;
        } else {
          x = static_cast<float>(kv_up.at(row * 2 * kNope + (is_value ? c - kHeadDim + kNope : c))) / (is_value ? v_divide : k_divide);
        }
        const uint32_t wanted = encode(output, to_fp8 && p.saturate ? saturated(output, x) : x);
        const uint32_t got = is_value ? v.code(row * kNope + c - kHeadDim) : k.code(row * kHeadDim + c);
        report.expect(wanted == got, std::string("pack_kv ") + name_of(input) + " to " + name_of(output) + " column " + std::to_string(c));
      }
    }
  }
  report.group("pack_kv");
}

// ---- Time

void time_decode() {
  struct Cell {
    int batch, tokens, heads, tile_rows;
  };
  constexpr int kThreads = 2, kRepeats = 15;
  const Device device = device_with(kThreads);
  Random random(12);
  for (const Cell& cell : {Cell{4, 4096, 24, 32}, Cell{1, 32768, 24, 32}, Cell{4, 4096, 128, 128}}) {
    for (const TypePair& types : {kTypePairs[0], kTypePairs[1], kTypePairs[2], kTypePairs[3]}) {
      DecodeShape s;
      s.q_type = types.q;
      s.cache_type = types.cache;
      s.heads = cell.heads;
      s.tile_rows = cell.tile_rows;
      s.parts = kThreads * parts_per_unit();
      s.kv_lens.assign(cell.batch, cell.tokens);
      DecodeCase problem(s, random);
      problem.make_plan(device);
      for (int variant : variants_here()) {
        problem.shape.variant = variant;
        double best = 1e9;
        for (int i = 0; i < kRepeats; ++i) {
          const auto start = std::chrono::steady_clock::now();
          decode(problem.params(), device);
          const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
          best = std::min(best, seconds.count());
        }
        const double bytes = 1.0 * cell.batch * cell.tokens * kWidth * size_of(types.cache);
        const double flops = 2.0 * cell.batch * cell.tokens * cell.heads * (kWidth + kLatent);
        std::printf("b %d x %5d tokens x %3d heads  %4s/%-6s  %-12s %8.2f ms %6.2f GB/s %7.1f GFLOP/s\n", cell.batch, cell.tokens,
                    cell.heads, name_of(types.q), name_of(types.cache), variants()[variant - 1], best * 1e3, bytes / best / 1e9,
                    flops / best / 1e9);
      }
    }
  }
}

int run_all() {
  const Device device = device_with(3);
  test_casts(device);
  test_update_cache();
  test_merge_states();
  test_pack_kv();
  test_plan();
  test_variants(device);
  test_decode_sweep(device);
  test_decode_heads(device);
  test_bad_values(device);
  test_hidden_nan(device);
  test_determinism();
  test_batch_invariance(device);
  std::printf("%s\n", report.clean() ? "all passed" : "FAILED");
  return report.clean() ? 0 : 1;
}

}  // namespace
}  // namespace mla::test

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "--time") {
    mla::test::time_decode();
    return 0;
  }
  if (!mode.empty() && mode != "--quick") {
    std::fprintf(stderr, "usage: %s [--quick | --time]\n", argv[0]);
    return 2;
  }
  mla::test::quick = mode == "--quick";
  return mla::test::run_all();
}
