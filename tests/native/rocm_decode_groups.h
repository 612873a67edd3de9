// Groups of the ROCm driver: mla_decode on AMD against float64, in the architecture's own formats.
#pragma once

#include "kernels/decode/gfx9/instances.h"
#include "kernels/decode/gfx9/limits.h"
#include "kernels/rocm/launch.h"
#include "tests/native/decode_groups.h"

namespace mla::test {

struct AmdTypes {
  DType q, cache;
  bool ds_mla = false;
};

inline std::string architecture_here() {
  const DeviceInfo* info = nullptr;
  report.expect_success(device_info(device_with(1), &info));
  return info == nullptr ? "" : info->architecture;
}

inline std::vector<AmdTypes> amd_types() {
  const DType own = gfx9::own_fp8(architecture_here());
  return {{DType::kBF16, DType::kBF16},
          {DType::kF16, DType::kF16},
          {DType::kBF16, own},
          {DType::kF16, own},
          {own, own},
          {DType::kBF16, DType::kE4M3FN, true}};
}

inline DecodeShape amd_shape(const AmdTypes& types) {
  DecodeShape s = shape_of(0, {types.q, types.cache});
  s.ds_mla = types.ds_mla;
  return s;
}

inline DecodeShape random_amd_shape(Random& random, const AmdTypes& types) {
  DecodeShape s = amd_shape(types);
  s.heads = choose(random, {16, 24, 24, 32, 48, 64});
  s.page_size = choose(random, {1, 4, 16, 48, 64, 64});
  s.max_q_len = s.heads > 24 ? choose(random, {1, 2}) : choose(random, {1, 2, 4});
  s.tile_rows = choose(random, {16, 32, 64});
  s.parts = choose(random, {1, 2, 3, 7});
  s.causal = pick(random, 0, 3) != 0;
  s.pair = pick(random, 0, 1) == 1;
  s.scales = pick(random, 0, 1) == 1;
  s.layers = choose(random, {1, 1, 3});
  s.layer = pick(random, 0, s.layers - 1);
  s.batch_invariant = pick(random, 0, 3) == 0;
  s.ragged = pick(random, 0, 1) == 1;
  for (int b = 0, batch = pick(random, 1, 3); b < batch; ++b) {
    s.kv_lens.push_back(choose(random, {0, 1, 2, 3, 13, 31, 32, 63, 64, 65, pick(random, 1, 150), 230}));
    s.q_lens.push_back(s.ragged ? pick(random, 0, s.max_q_len) : s.max_q_len);
  }
  s.extra_tokens = s.ragged ? pick(random, 0, 2) : 0;
  if (s.ragged && s.extra_tokens == 0) s.q_lens[0] = std::max(s.q_lens[0], 1);
  return s;
}

// Random problems, and for each pair of types one of 24 heads over whole pages: the case that the kernels are made for.
inline void test_amd_decode() {
  Random random(21);
  for (const AmdTypes& types : amd_types()) {
    double worst = 0;
    DecodeShape native = amd_shape(types);
    native.parts = 3;
    native.kv_lens = std::vector<int>{230, 96};
    DecodeCase first(native, random);
    check_decode(first, device_with(1), "24 heads", &worst);
    DecodeShape edges = native;  // lengths about what is on its way at once; pages that end within blocks
    edges.parts = 1;
    edges.page_size = choose(random, {8, 24, 40});
    edges.kv_lens = std::vector<int>{32, 96, 97, 128, 129, 160, 161};
    DecodeCase around(edges, random);
    check_decode(around, device_with(1), "edges", &worst);
    for (int i = 0; i < (quick ? 6 : 60); ++i) {
      DecodeCase problem(random_amd_shape(random, types), random);
      check_decode(problem, device_with(1), "decode", &worst);
    }
    char detail[64];
    std::snprintf(detail, sizeof(detail), "worst relative error %.1e", worst);
    report.group(std::string("decode of ") + test::name_of(types.q) + " over " +
                     (types.ds_mla ? "fp8_ds_mla" : test::name_of(types.cache)),
                 detail);
  }
}

// Lengths, page ids, layers and query counts that lead nowhere.
inline void test_amd_bad_values() {
  Random random(22);
  double worst = 0;
  for (const AmdTypes& types : amd_types()) {
    DecodeShape s = amd_shape(types);
    s.page_size = 16;
    s.max_q_len = 2;
    s.kv_lens = std::vector<int>{0, -1, INT32_MIN, 40, 1000, 70, INT32_MAX};
    DecodeCase past_the_table(s, random, /*table_pages=*/5);
    check_decode(past_the_table, device_with(1), "lengths", &worst);

    for (int page_size : {16, 4}) {
      s.page_size = page_size;
      DecodeCase bad_pages(s, random, 5);
      for (int b = 3; b < s.batch(); ++b) {
        bad_pages.page_table[b * 5 + pick(random, 0, 4)] = choose(random, {-1, INT32_MIN, INT32_MAX, bad_pages.pages});
      }
      check_decode(bad_pages, device_with(1), "page ids", &worst);
    }

    DecodeShape stacked = s;
    stacked.layers = 3;
    stacked.kv_lens = std::vector<int>{40};
    for (int layer : {-1, 3, INT32_MIN, INT32_MAX}) {
      stacked.layer = layer;
      DecodeCase bad_layer(stacked, random, 5);
      check_decode(bad_layer, device_with(1), "layer", &worst);
    }

    DecodeShape longer = s;  // requests with more queries than max_q_len: the rest are empty rows
    longer.ragged = true;
    longer.kv_lens = std::vector<int>{70, 30, 5};
    longer.q_lens = std::vector<int>{5, 1, 3};
    DecodeCase more_queries(longer, random, 5);
    check_decode(more_queries, device_with(1), "query counts", &worst);
  }
  report.group("decode, values out of bounds");
}

// Plans, lengths and page tables of garbage: only that nothing outside the arrays is touched, which the emulator sees.
inline void test_amd_garbage() {
  Random random(23);
  for (const AmdTypes& types : amd_types()) {
    for (int i = 0; i < (quick ? 3 : 20); ++i) {
      DecodeCase garbage(random_amd_shape(random, types), random);
      report.expect_success(garbage.make_plan(device_with(1)));
      const auto spoil = [&](void* data, size_t count) {
        for (size_t j = 0; j < count; ++j) {
          const int value = choose(random, {static_cast<int>(random()), pick(random, -2, 4), pick(random, -70, 300)});
          if (pick(random, 0, 2) == 0) std::memcpy(static_cast<char*>(data) + j * 4, &value, 4);
        }
      };
      spoil(garbage.items.data(), garbage.items.size() * 8);
      spoil(garbage.splits.data(), garbage.splits.size() * 2);
      spoil(garbage.part_offsets.data(), garbage.part_offsets.size());
      // A block beyond the first hundred is like the first: this keeps the emulator's time short.
      for (WorkItem& item : garbage.items) item.kv_begin = std::max(item.kv_begin, item.kv_end - 200);
      if (i % 2 == 0) spoil(garbage.cu_q_lens.data(), garbage.cu_q_lens.size());
      if (i % 3 == 0) spoil(garbage.kv_lens.data(), garbage.kv_lens.size());
      spoil(garbage.page_table.data(), garbage.page_table.size());
      report.expect_success(garbage.run(device_with(1)));
    }
  }
  report.group("decode, garbage");
}

// NaN in the newest token's row reaches the newest query alone.
inline void test_amd_hidden_nan() {
  Random random(24);
  for (const AmdTypes& types : amd_types()) {
    for (int kv_len : {4, 33, 65}) {
      DecodeShape s = amd_shape(types);
      s.heads = 16;
      s.max_q_len = 4;
      s.tile_rows = choose(random, {32, 64});
      s.page_size = choose(random, {4, 64});
      s.kv_lens.assign(1, kv_len);
      s.parts = choose(random, {1, 3});
      DecodeCase problem(s, random);
      report.expect_success(problem.make_plan(device_with(1)));
      report.expect_success(problem.run(device_with(1)));
      const Array clean = problem.out;
      const auto clean_lse = problem.lse;
      const int64_t slot = problem.slot_of(0, kv_len - 1);
      if (s.ds_mla) {
        std::memset(problem.cache.bytes.data() + slot * kDsMlaBytes, 0xFF, kDsMlaBytes);
      } else {
        for (int c = 0; c < kWidth; ++c) problem.cache.set_code(slot * kWidth + c, nan_code(s.cache_type));
      }
      report.expect_success(problem.run(device_with(1)));
      const size_t hidden = size_t{3} * s.heads;
      const bool same =
          std::memcmp(clean.bytes.data(), problem.out.data(), hidden * kLatent * size_of(clean.type)) == 0 &&
          std::memcmp(clean_lse.data(), problem.lse.data(), hidden * sizeof(float)) == 0;
      report.expect(same, "a query changed with a token that it does not see: " + s.text());
      report.expect(std::isnan(problem.out.at(hidden * kLatent)),
                    "NaN was lost for the query that sees it: " + s.text());
    }
  }
  report.group("decode, NaN behind the causal limit");
}

// What the entry function does not take, it refuses in a sentence with values.
inline void test_amd_decode_refusals() {
  Random random(25);
  const std::string here = architecture_here();
  const DType own = gfx9::own_fp8(here), other = own == DType::kE4M3FN ? DType::kE4M3FNUZ : DType::kE4M3FN;
  DecodeShape s = amd_shape({DType::kBF16, DType::kBF16});
  s.kv_lens.assign(1, 5);
  DecodeCase problem(s, random);
  report.expect_success(problem.make_plan(device_with(1)));
  const auto refused = [&](const std::string& words, auto change) {
    DecodeParams p = problem.params();
    change(p);
    const Error error = decode(p, device_with(1));
    report.expect(error.find(words) != Error::npos, "expected an error with '" + words + "', got '" + error + "'");
  };
  using P = DecodeParams;
  refused("variant is 3, this module has 2", [](P& p) { p.variant = 3; });
  refused("cannot run on device", [&](P& p) { p.variant = here == "gfx942" ? 2 : 1; });
  refused("writes bfloat16, out is float16", [](P& p) { p.out_dtype = DType::kF16; });
  refused("belong to fp8", [&](P& p) { p.k_scale = problem.k_scale.data(); });
  refused("these are bfloat16 over float16", [](P& p) { p.cache_dtype = DType::kF16; });
  refused("these are bfloat16 over " + std::string(mla::name_of(other)), [&](P& p) { p.cache_dtype = other; });
  refused("has 2 k_scales, expected 1 or one for each of 1 layers", [&](P& p) {
    p.cache_dtype = own;
    p.k_scale = problem.k_scale.data();
    p.k_scales = 2;
  });
  refused("these are float16 over fp8_ds_mla", [](P& p) {
    p.ds_mla = true;
    p.cache_dtype = DType::kE4M3FN;
    p.q_dtype = p.out_dtype = DType::kF16;
  });
  refused("1 to 64 rows a tile, this one has 65", [](P& p) { p.plan.tile_rows = 65; });
  refused("slots are 32-bit numbers", [](P& p) { p.pages = int64_t{1} << 26; });
  refused("each must be positive", [](P& p) { p.plan.parts = 0; });
  refused("each must be positive", [](P& p) { p.max_q_len = 0; });
  report.group("decode, refusals");
}

// The same bits in each run, and a row's own bits whatever else is in the batch where that is asked for.
inline void test_amd_same_bits() {
  Random random(26);
  for (const AmdTypes& types : amd_types()) {
    DecodeShape s = amd_shape(types);
    s.max_q_len = 2;
    s.batch_invariant = true;
    s.kv_lens = std::vector<int>{5, 150, 70};
    DecodeCase together(s, random);
    report.expect_success(together.make_plan(device_with(1)));
    report.expect_success(together.run(device_with(1)));
    const Array out = together.out;
    const auto lse = together.lse;
    report.expect_success(together.run(device_with(1)));
    report.expect(out.bytes == together.out.bytes && std::memcmp(lse.data(), together.lse.data(), lse.size() * 4) == 0,
                  "other bits in a second run: " + s.text());
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
      const int64_t q_bytes = rows * kWidth * size_of(s.q_type), out_bytes = rows * kLatent * size_of(out.type);
      std::memcpy(alone.q.data(), together.q.bytes.data() + b * q_bytes, q_bytes);
      report.expect_success(alone.make_plan(device_with(1)));
      report.expect_success(alone.run(device_with(1)));
      report.expect(std::memcmp(alone.out.data(), together.out.bytes.data() + b * out_bytes, out_bytes) == 0 &&
                        std::memcmp(alone.lse.data(), together.lse.data() + b * rows, rows * sizeof(float)) == 0,
                    "alone differs from in the batch: " + alone_shape.text());
    }
  }
  report.group("decode, same bits again and alone");
}

}  // namespace mla::test
