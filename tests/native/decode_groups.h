// Tests of plan_decode and decode, one function a group.
#pragma once

#include <cstdio>

#include "kernels/capability.h"
#include "tests/native/decode_case.h"
#include "tests/native/plan_case.h"

namespace mla::test {

inline std::vector<int> variants_here() {
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
    {DType::kBF16, DType::kBF16},    {DType::kF16, DType::kF16},       {DType::kF32, DType::kF32},
    {DType::kBF16, DType::kE4M3FN},  {DType::kBF16, DType::kE4M3FNUZ}, {DType::kF16, DType::kE4M3FN},
    {DType::kF16, DType::kE4M3FNUZ}, {DType::kE4M3FN, DType::kE4M3FN}, {DType::kE4M3FNUZ, DType::kE4M3FNUZ},
};

inline double out_tolerance(DType q) { return q == DType::kF32 ? 1e-5 : q == DType::kF16 ? 1e-3 : 1e-2; }
inline double lse_tolerance(DType q) { return q == DType::kF32 ? 2e-5 : 1e-3; }

inline void check_decode(DecodeCase& problem, const Device& device, const char* what, double* worst) {
  const DecodeShape& s = problem.shape;
  Error error = problem.make_plan(device);
  if (error.empty()) error = problem.run(device);
  if (error.empty()) error = problem.compare(out_tolerance(s.q_type), lse_tolerance(s.q_type), worst);
  report.expect(error.empty(), std::string(what) + ": " + error + " [" + s.text() + "]");
}

inline DecodeShape shape_of(int variant, TypePair types) {
  DecodeShape s;
  s.variant = variant;
  s.q_type = types.q;
  s.cache_type = types.cache;
  return s;
}

inline DecodeShape random_shape(Random& random, int variant, TypePair types) {
  DecodeShape s = shape_of(variant, types);
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

inline void test_decode_sweep(const Device& device) {
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
      report.group(
          std::string("decode ") + variants()[variant - 1] + " " + name_of(types.q) + "/" + name_of(types.cache),
          detail);
    }
  }
}

inline void test_decode_ds_mla(const Device& device) {
  Random random(7);
  double worst = 0;
  for (int variant : variants_here()) {
    for (DType q_type : {DType::kBF16, DType::kF16}) {
      for (int i = 0; i < (quick ? 3 : 10); ++i) {
        DecodeShape s = random_shape(random, variant, {q_type, DType::kE4M3FN});
        s.ds_mla = true;
        DecodeCase problem(s, random);
        check_decode(problem, device, "decode", &worst);
      }
    }
  }
  char detail[64];
  std::snprintf(detail, sizeof(detail), "worst relative error %.1e", worst);
  report.group("decode over fp8_ds_mla", detail);
}

inline void test_decode_heads(const Device& device) {
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

inline void test_bad_values(const Device& device) {
  Random random(3);
  double worst = 0;
  for (int variant : variants_here()) {
    for (const TypePair& types : {kTypePairs[0], kTypePairs[2], kTypePairs[3]}) {
      DecodeShape s = shape_of(variant, types);
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

      DecodeShape longer = s;  // requests with more queries than max_q_len: the rest are empty rows
      longer.ragged = true;
      longer.kv_lens = std::vector<int>{70, 30, 5};
      longer.q_lens = std::vector<int>{5, 1, 3};
      DecodeCase more_queries(longer, random, 5);
      check_decode(more_queries, device, "query counts", &worst);

      // Only that nothing outside the arrays is touched, which a sanitizer sees.
      for (int i = 0; i < (quick ? 10 : 60); ++i) {
        DecodeCase garbage(random_shape(random, variant, types), random);
        garbage.make_plan(device);
        const auto any = [&] {
          return choose(random, {static_cast<int>(random()), pick(random, -2, 4), pick(random, -70, 300)});
        };
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
inline void test_hidden_nan(const Device& device) {
  Random random(4);
  for (int variant : variants_here()) {
    for (const TypePair& types : {kTypePairs[0], kTypePairs[2], kTypePairs[3]}) {
      for (int kv_len : {4, 61, 64, 65, 66, 128, 130}) {
        DecodeShape s = shape_of(variant, types);
        s.heads = 12;
        s.max_q_len = 4;
        s.tile_rows = 64;
        s.kv_lens.assign(1, kv_len);
        s.parts = choose(random, {1, 3});
        DecodeCase problem(s, random);
        problem.make_plan(device);
        problem.run(device);
        const Array clean = problem.out;
        const auto clean_lse = problem.lse;
        const int64_t slot = problem.slot_of(0, kv_len - 1);
        for (int c = 0; c < kWidth; ++c) problem.cache.set_code(slot * kWidth + c, nan_code(s.cache_type));
        problem.run(device);
        const size_t hidden = size_t{3} * 12;
        const bool same =
            std::memcmp(clean.bytes.data(), problem.out.data(), hidden * kLatent * size_of(clean.type)) == 0 &&
            std::memcmp(clean_lse.data(), problem.lse.data(), hidden * sizeof(float)) == 0;
        report.expect(same, "a query changed with a token that it does not see: " + s.text());
        report.expect(std::isnan(problem.out.at(hidden * kLatent)),
                      "NaN was lost for the query that sees it: " + s.text());
      }
    }
  }
  report.group("decode, NaN behind the causal limit");
}

inline void test_determinism() {
  Random random(5);
  for (int variant : variants_here()) {
    for (const TypePair& types : kTypePairs) {
      for (int i = 0; i < (quick ? 1 : 3); ++i) {
        DecodeCase problem(random_shape(random, variant, types), random);
        problem.make_plan(device_with(1));
        problem.run(device_with(1));
        const Array out = problem.out;
        const auto lse = problem.lse;
        for (int threads : {2, 3, 5, 2}) {
          problem.run(device_with(threads));
          report.expect(
              out.bytes == problem.out.bytes && std::memcmp(lse.data(), problem.lse.data(), lse.size() * 4) == 0,
              "other bits with " + std::to_string(threads) + " threads: " + problem.shape.text());
        }
      }
    }
  }
  report.group("decode, same bits again");
}

inline void test_batch_invariance(const Device& device) {
  Random random(6);
  for (int variant : variants_here()) {
    for (const TypePair& types : {kTypePairs[0], kTypePairs[2], kTypePairs[3]}) {
      DecodeShape s = shape_of(variant, types);
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
        const int64_t q_bytes = rows * kWidth * size_of(s.q_type),
                      out_bytes = rows * kLatent * size_of(together.out.type);
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

inline void test_plan() {
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
      if (item.kv_begin != reached[tile] || item.kv_end <= item.kv_begin)
        wrong = "pieces of a tile do not follow each other";
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
      if (split.first_partial != (split.count < 2 ? -1 : next_partial))
        wrong = "first_partial is not the sum before it";
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

// The same bits as a serial planner over the same rule, for batches that are cut in each of its ways.
inline void test_plan_rule(const Device& device) {
  Random random(17);
  int cuts[4] = {};
  for (int i = 0; i < (quick ? 24 : 120); ++i) {
    const bool alike = pick(random, 0, 1) == 1;  // one length for all requests, and as many tiles
    DecodeShape s;
    s.heads = choose(random, {1, 24, 31, 128});
    s.max_q_len = pick(random, 1, 4);
    s.tile_rows = choose(random, {16, 32, 64});
    s.parts = pick(random, 1, 300);
    s.ragged = pick(random, 0, 1) == 1;
    s.batch_invariant = pick(random, 0, 2) == 0;
    const int batch = choose(random, {1, 2, 31, quick ? 60 : 1100}),
              longest = choose(random, {100, 2000, 9000, 200000});
    for (int b = 0; b < batch; ++b) {
      s.kv_lens.push_back(pick(random, 0, 4) == 0 ? pick(random, -2, 0) : pick(random, 1, longest));
      if (alike) s.kv_lens[b] = b == 0 ? std::max(s.kv_lens[0], 1) : s.kv_lens[0];
      s.q_lens.push_back(alike ? s.max_q_len : pick(random, 0, s.max_q_len));
    }
    PlanCase problem(s);
    const PlanDecodeParams p = problem.params();
    report.expect_success(plan_decode(p, device));
    const SplitRule rule = rule_on_host(p);
    const HostPlan expected = plan_on_host(p, rule);
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
    };
    report.expect(expected.wrong.empty(), expected.wrong);
    report.expect(same(problem.items, expected.items), "items of " + s.text());
    report.expect(same(problem.part_offsets, expected.part_offsets), "part_offsets of " + s.text());
    report.expect(same(problem.splits, expected.tile_splits), "tile_splits of " + s.text());
    ++cuts[static_cast<int>(rule.cut)];
  }
  report.group("plan_decode, its rule", std::to_string(cuts[0]) + " whole, " + std::to_string(cuts[1]) + " even, " +
                                            std::to_string(cuts[2]) + " line, " + std::to_string(cuts[3]) +
                                            " invariant");
}

inline void test_variants(const Device& device) {
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
    if (!runs)
      report.expect(error.find(variant < 1 || variant > 5 ? "variant is" : "cannot run") != Error::npos, error);
  }
  std::string names;
  for (int variant : here) names += std::string(" ") + variants()[variant - 1];
  report.group("variants", "this machine runs" + names);
}

}  // namespace mla::test
