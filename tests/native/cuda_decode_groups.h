// The driver's groups for mla_decode: each runs for every variant that the device has.
#pragma once

#include "kernels/decode/generic/instance.h"
#include "kernels/decode/reduce.h"
#include "tests/native/cuda_decode_case.h"
#include "tests/native/cuda_host_decode.h"

namespace mla::test {

struct Tally {
  int count = 0;
  double out = 0, lse = 0;

  void check(const DecodeShapes& shapes) {
    DecodeCase decode_case(shapes);
    decode_case.run();
    add(decode_case.verify());
  }

  void add(const Errors& errors) {
    ++count;
    out = std::max(out, errors.out);
    lse = std::max(lse, errors.lse);
  }

  std::string text() const {
    char text[100];
    std::snprintf(text, sizeof(text), "%d calls, worst error of out %.1e, of lse %.1e", count, out, lse);
    return text;
  }
};

// The device's oracle beside the definition in plain fp64 on the host, far below any tolerance.
inline std::string oracle_group(const Variant& variant, bool) {
  double worst = 0, worst_lse = 0;
  for (int32_t heads : {3, 11}) {
    DecodeShapes shapes;
    shapes.variant = &variant;
    shapes.heads = heads;
    shapes.max_q_len = 2;
    shapes.page_size = 16;
    shapes.kv_lens = {130, 1, 0, 67};
    shapes.layers = 2;
    shapes.layer = 1;
    shapes.scale = heads == 3 ? shapes.scale : 1.0f;
    DecodeCase decode_case(shapes);
    const OracleResult oracle = run_oracle(decode_case.params());
    const std::vector<float> out = oracle.out.download(), lse = oracle.lse.download();
    const HostResult expected = decode_on_host(decode_case.params());
    for (size_t row = 0; row < lse.size(); ++row) {
      double difference = 0, norm = 0;
      for (int c = 0; c < kLatent; ++c) {
        const double value = expected.out[row * kLatent + c];
        difference += (out[row * kLatent + c] - value) * (out[row * kLatent + c] - value);
        norm += value * value;
      }
      const bool empty = expected.lse[row] == -INFINITY;
      const double error = empty ? difference : std::sqrt(difference / norm);
      const double lse_error = lse[row] == expected.lse[row] ? 0 : std::fabs(lse[row] - expected.lse[row]);
      require(error <= 1e-5 && lse_error <= 1e-5, shapes.text() + ": the oracle is wrong in row " +
                                                      std::to_string(row) + " by " + std::to_string(error) + " and " +
                                                      std::to_string(lse_error));
      worst = std::max(worst, error);
      worst_lse = std::max(worst_lse, lse_error);
    }
  }
  char text[100];
  std::snprintf(text, sizeof(text), "worst error of the oracle's out %.1e, of lse %.1e", worst, worst_lse);
  return text;
}

inline DecodeShapes shapes_for(const Variant& variant) {
  DecodeShapes shapes;
  shapes.variant = &variant;
  return shapes;
}

inline std::string heads_group(const Variant& variant, bool quick) {
  Tally tally;
  for (int32_t heads = 1; heads <= 128; heads += quick ? 17 : 1) {
    DecodeShapes shapes = shapes_for(variant);
    shapes.heads = heads;
    shapes.seed = heads;
    tally.check(shapes);
  }
  return tally.text();
}

inline std::string shapes_group(const Variant& variant, bool quick) {
  Tally tally;
  uint64_t seed = 1;
  for (int32_t heads : {1, 3, 8, 16, 17, 24, 32, 40, 48, 64, 96, 128, 144}) {
    for (int32_t queries : {1, 2, 4, 8}) {
      for (int32_t page_size : {1, 4, 16, 32, 48, 64, 128, 192, 256}) {
        if (!variant.takes_pages_of(page_size) || (quick && seed++ % 41 != 0)) continue;
        for (bool causal : {false, true}) {
          DecodeShapes shapes = shapes_for(variant);
          shapes.heads = heads;
          shapes.max_q_len = queries;
          shapes.page_size = page_size;
          shapes.causal = causal;
          shapes.seed = seed++;
          Random random(static_cast<uint32_t>(seed));
          shapes.kv_lens = {pick(random, 1, 3), pick(random, 65, 330), 0, pick(random, 1, 200), 64, 128};
          shapes.pair = seed / 2 % 2 == 0;
          shapes.batch_invariant = seed % 5 == 0;
          if (seed / 4 % 2 == 0) {
            for (size_t b = 0; b < shapes.kv_lens.size(); ++b) shapes.q_lens.push_back(pick(random, 0, queries));
            shapes.unowned_tokens = pick(random, 0, 2);
            if (shapes.q_lens == std::vector<int32_t>(6, 0)) shapes.q_lens[1] = 1;
          }
          tally.check(shapes);
        }
      }
    }
  }
  return tally.text();
}

// Long requests: many splits of one tile, several blocks a piece.
inline std::string long_group(const Variant& variant, bool quick) {
  Tally tally;
  uint64_t seed = 500;
  for (int32_t heads : {5, 24, 64, 128}) {
    for (int32_t queries : {1, 3}) {
      if (quick && (heads != 24 || queries != 1)) continue;
      DecodeShapes shapes = shapes_for(variant);
      shapes.heads = heads;
      shapes.max_q_len = queries;
      shapes.kv_lens = quick ? std::vector<int32_t>{700} : std::vector<int32_t>{4000, 3, 2049};
      shapes.seed = seed++;
      tally.check(shapes);
      shapes.batch_invariant = true;
      tally.check(shapes);
      if (quick) continue;
      shapes.batch_invariant = false;
      shapes.kv_lens.assign(200, 0);
      Random random(static_cast<uint32_t>(seed));
      for (int32_t& kv_len : shapes.kv_lens) kv_len = pick(random, 0, 1500);
      tally.check(shapes);
    }
  }
  if (!quick) {
    DecodeShapes longest = shapes_for(variant);
    longest.heads = 24;
    longest.kv_lens = {5, 1 << 20};
    tally.check(longest);
  }
  return tally.text();
}

// Maxima that grow from block to block by more than the softmax's slack, or (below 0) where scores were smallest.
inline std::string steep_group(const Variant& variant, bool quick) {
  Tally tally;
  for (float scale : {0.7f, -0.7f, 0.0f}) {
    for (int32_t heads : {8, 24, 48, 128}) {
      if (quick && heads != 24) continue;
      DecodeShapes shapes = shapes_for(variant);
      shapes.heads = heads;
      shapes.scale = scale;
      shapes.kv_lens = quick ? std::vector<int32_t>{500, 3, 130} : std::vector<int32_t>{1000, 3, 4000, 130};
      shapes.seed = 600 + heads;
      tally.check(shapes);
      shapes.kv_lens.assign(300, 640);
      if (!quick) tally.check(shapes);
    }
  }
  return tally.text();
}

// fp8: scales of the call and of the layer, none, and every code of a byte.
inline std::string scales_group(const Variant& variant, bool) {
  if (!variant.fp8()) return "left out";
  Tally tally;
  for (bool all_codes : {false, true}) {
    for (int32_t layers : {1, 3}) {
      for (bool scaled : {false, true}) {
        for (bool layer_scales : {false, true}) {
          DecodeShapes shapes = shapes_for(variant);
          shapes.heads = 24;
          shapes.max_q_len = 2;
          shapes.kv_lens = {1, 2, 3, 400, 64};
          shapes.scaled = scaled;
          shapes.layer_scales = layer_scales;
          shapes.layers = layers;
          shapes.layer = layers - 1;
          shapes.all_codes = all_codes;
          if (all_codes) shapes.scale *= scaled ? 0.5f : 1.0f / 128;  // else one key outweighs all others
          shapes.seed = 70 + tally.count;
          tally.check(shapes);
          if (variant.q_dtype != DType::kBF16) continue;
          for (int exponent : {-100, -20, 20, 100}) {  // queries that are no halves
            shapes.query_magnitude = std::ldexp(1.0f, exponent);
            shapes.scale = std::ldexp(shapes.scale, -exponent);
            tally.check(shapes);
            shapes.scale = std::ldexp(shapes.scale, exponent);
          }
        }
      }
    }
  }
  return tally.text();
}

// A NaN in a cached token: in every row that sees the token, and in no other.
inline std::string nan_group(const Variant& variant, bool) {
  Tally tally;
  for (int32_t page_size : {16, 64}) {
    for (int32_t heads : {3, 24, 100}) {
      for (int32_t token : {0, 95, 129, 137, 199}) {
        DecodeShapes shapes = shapes_for(variant);
        shapes.heads = heads;
        shapes.page_size = page_size;
        shapes.kv_lens = {130, 200, 66};
        shapes.nan_request = 1;
        shapes.nan_token = token;
        shapes.seed = token;
        tally.check(shapes);
        shapes.max_q_len = 4;  // hidden by causality from some of a tile's queries
        shapes.nan_token = 199 - token % 4;
        tally.check(shapes);
      }
    }
  }
  return tally.text();
}

inline std::string edges_group(const Variant& variant, bool) {
  Tally tally;
  DecodeShapes shapes = shapes_for(variant);
  shapes.heads = 24;
  shapes.max_q_len = 2;
  for (int32_t page_size : {4, 16, 64, 128}) {  // lengths of 0, below it, and past the table
    if (!variant.takes_pages_of(page_size)) continue;
    shapes.page_size = page_size;
    shapes.max_pages = 5;
    shapes.kv_lens = {0, -5, 5 * page_size, 5 * page_size + 1, 1000000, 0x7FFFFFFF - 1, -0x7FFFFFFF - 1, 7};
    tally.check(shapes);
    shapes.causal = false;
    tally.check(shapes);
    shapes.causal = true;
  }
  shapes = shapes_for(variant);
  for (int32_t page_size : {1, 16, 32, 64, 192}) {  // pages that lead nowhere, some of whole requests
    if (!variant.takes_pages_of(page_size)) continue;
    shapes.page_size = page_size;
    shapes.bad_pages = true;
    shapes.max_q_len = 3;
    shapes.kv_lens = {1, page_size, 2 * page_size, 300, 64, 500};
    shapes.seed = 40 + page_size;
    tally.check(shapes);
  }
  shapes = shapes_for(variant);  // a token more than a request may have, and no token at all
  shapes.max_q_len = 2;
  shapes.q_lens = {3, 0, 5};
  shapes.kv_lens = {100, 100, 100};
  shapes.unowned_tokens = 4;
  tally.check(shapes);
  shapes.q_lens = {0, 0, 0};
  tally.check(shapes);
  shapes = shapes_for(variant);  // fewer keys than queries: the first queries see none
  shapes.max_q_len = 8;
  shapes.kv_lens = {1, 2, 3, 4, 7, 8};
  tally.check(shapes);
  for (int32_t layers : {1, 3}) {
    for (int32_t layer : {-1, 0, layers - 1, layers, -0x7FFFFFFF - 1}) {
      shapes = shapes_for(variant);
      shapes.layers = layers;
      shapes.layer = layer;
      tally.check(shapes);
    }
  }
  return tally.text();
}

// What a plan holds may cost time or results, never an access outside the arrays.
inline std::string bad_plans_group(const Variant& variant, bool quick) {
  int count = 0;
  Random random(3);
  for (int32_t heads : {3, 24, 100}) {
    for (int trial = 0; trial < (quick ? 2 : 8); ++trial) {
      DecodeShapes shapes = shapes_for(variant);
      shapes.heads = heads;
      shapes.max_q_len = 2;
      shapes.kv_lens = {300, 5, 0, 170};
      shapes.q_lens = {2, 1, 0, 2};
      DecodeCase decode_case(shapes);
      decode_case.run();
      auto wild = [&] { return trial % 2 ? pick(random, -0x7FFFFFFF - 1, 0x7FFFFFFF) : pick(random, -2, 6); };
      PlanArrays& plan = decode_case.plan();
      std::vector<WorkItem> items(plan.items.size());
      for (WorkItem& item : items) {
        const int32_t begin = trial % 3 ? 64 * pick(random, -1, 4) : wild();
        item = {wild(), wild(), begin, wild(), wild(), {0, 0, 0}};
      }
      std::vector<int32_t> offsets(plan.part_offsets.size());
      for (int32_t& offset : offsets) offset = wild();
      std::vector<TileSplits> splits(plan.tile_splits.size());
      for (TileSplits& split : splits) split = {wild(), wild()};
      if (trial % 4 < 2) plan.items.upload(items);
      if (trial % 4 != 1) plan.part_offsets.upload(offsets);
      if (trial % 4 != 0) plan.tile_splits.upload(splits);
      check(decode(decode_case.params(), device()));
      synchronize();
      decode_case.make_plan();
      decode_case.kv_lens().upload({10, 300, 200, 0});  // now the plan is stale
      check(decode(decode_case.params(), device()));
      synchronize();
      decode_case.kv_lens().upload(shapes.kv_lens);
      decode_case.run();  // a good plan again: the device is unharmed, and so are the results
      decode_case.verify();
      ++count;
    }
  }
  return std::to_string(count) + " garbage and stale plans";
}

inline std::string far_group(const Variant& variant, bool quick) {
  if (quick) return "left out";
  Tally tally;
  DecodeShapes shapes = shapes_for(variant);
  shapes.heads = 24;
  shapes.max_q_len = 2;
  shapes.kv_lens = {130, 64, 1};
  shapes.skipped_pages = 62000;  // of 64 * 576 elements: past 2^31
  tally.check(shapes);
  shapes.skipped_pages = 31500;  // in the second layer alone
  shapes.layers = 2;
  shapes.layer = 1;
  tally.check(shapes);
  return tally.text();
}

// The instances that GPUs with less shared memory take, and plans made for tiles of another kernel.
inline std::string small_memory_group(const Variant& variant, bool quick) {
  if (variant.name != "generic") return "left out";
  Tally tally;
  for (int32_t shared_limit : {99 * 1024, 163 * 1024}) {
    for (int32_t heads : {9, 24, 60, 128}) {
      DecodeShapes shapes = shapes_for(variant);
      shapes.heads = heads;
      shapes.max_q_len = 2;
      shapes.tile_rows = heads == 9 ? 16 : heads == 24 ? 24 : heads == 60 ? 48 : 64;
      shapes.kv_lens = {300, 1, 0, 129, quick ? 200 : 1500};
      DecodeCase decode_case(shapes);
      decode_case.make_plan();
      decode_case.poison();
      check(decode_generic(decode_case.params(), device(), shared_limit));
      check(reduce(decode_case.params(), device(), /*dependent=*/false));
      tally.add(decode_case.verify());
    }
  }
  return tally.text();
}

inline std::string repeats_group(const Variant& variant, bool quick) {
  int count = 0;
  for (int32_t heads : {7, 24, 128}) {
    DecodeShapes shapes = shapes_for(variant);
    shapes.heads = heads;
    shapes.max_q_len = 2;
    shapes.kv_lens = {700, 0, 130, 64, quick ? 1 : 3000};
    shapes.q_lens = {2, 1, 0, 2, 1};
    DecodeCase decode_case(shapes);
    decode_case.run();
    const auto out = decode_case.out();
    const auto lse = decode_case.lse();
    for (int i = 0; i < (quick ? 2 : 20); ++i, ++count) {
      decode_case.run();
      require(same_bits(out, decode_case.out()) && same_bits(lse, decode_case.lse()), shapes.text() + ": other bits");
    }
  }
  return std::to_string(count) + " repeats of the same bits";
}

// With batch_invariant a request's rows are the same bits alone and in company.
inline std::string invariance_group(const Variant& variant, bool quick) {
  int count = 0;
  for (int32_t heads : {7, 24, 128}) {
    DecodeShapes shapes = shapes_for(variant);
    shapes.heads = heads;
    shapes.max_q_len = 2;
    shapes.batch_invariant = true;
    shapes.kv_lens = {700, 33, quick ? 1 : 5000, 64, quick ? 2 : 2048};
    DecodeCase whole(shapes);
    whole.run();
    const auto out = whole.out();
    const auto lse = whole.lse();
    const auto batch = static_cast<int32_t>(shapes.kv_lens.size());
    const int64_t rows = int64_t{shapes.max_q_len} * heads;
    for (int32_t b = 0; b < batch; ++b, ++count) {
      // The same arrays seen as a batch of one.
      DecodeParams& p = whole.params();
      const DecodeParams kept = p;
      PlanArrays plan(1, p.plan.row_tiles, p.plan.tile_rows, p.plan.parts, true);
      p.q_latent = static_cast<const uint8_t*>(p.q_latent) + b * rows * kWidth * size_of(p.q_dtype);
      p.q_rope = static_cast<const uint8_t*>(p.q_rope) + b * rows * kWidth * size_of(p.q_dtype);
      p.page_table += int64_t{b} * p.max_pages;
      p.kv_lens += b;
      p.batch = 1;
      p.tokens = shapes.max_q_len;
      p.plan = plan.plan;
      whole.run();
      const auto out_alone = whole.out();
      const auto lse_alone = whole.lse();
      p = kept;
      const int64_t bytes = rows * whole.out_row_bytes();
      const bool same = std::memcmp(out.data() + b * bytes, out_alone.data(), bytes) == 0 &&
                        std::memcmp(lse.data() + b * rows, lse_alone.data(), rows * sizeof(float)) == 0;
      require(same, shapes.text() + ": request " + std::to_string(b) + " alone has other bits");
    }
  }
  return std::to_string(count) + " requests alone";
}

inline std::string refusals_group(const Variant& variant, bool) {
  DecodeCase decode_case(shapes_for(variant));
  DecodeParams p = decode_case.params();
  int count = 0;
  auto refused = [&](const DecodeParams& params, const char* word) {
    const Error error = decode(params, device());
    require(error.find(word) != Error::npos, std::string("expected an error with ") + word + ", got: " + error);
    ++count;
  };
  p.cache_dtype = DType::kE4M3FNUZ;
  refused(p, "float8_e4m3fnuz");
  p = decode_case.params();
  p.out_dtype = DType::kF32;
  refused(p, "float32");
  p = decode_case.params();
  p.variant = static_cast<int32_t>(variants().size()) + 1;
  refused(p, "variant");
  p = decode_case.params();
  p.plan.tile_rows = 65;
  refused(p, "65");
  p = decode_case.params();
  p.k_scale = p.lse;
  if (!variant.fp8()) refused(p, "k_scale");
  p.q_scale = p.lse;
  if (p.q_dtype != DType::kE4M3FN) refused(p, "q_scale");
  return std::to_string(count) + " refused calls";
}

// Variant 0 is the best kernel that takes the call, whatever kernel the tiles were chosen for.
inline std::string choice_group(const Variant& variant, bool) {
  int count = 0;
  for (int32_t tile_rows : {8, 16, 24, 32, 40, 48, 64}) {
    for (int32_t page_size : {4, 16, 64}) {
      DecodeShapes shapes = shapes_for(variant);
      shapes.heads = 24;
      shapes.tile_rows = tile_rows;
      shapes.page_size = page_size;
      DecodeCase decode_case(shapes);
      const Variant *expected = nullptr, *generic = nullptr;
      for (const Variant& candidate : decode_variants()) {
        if (candidate.dtypes() != variant.dtypes()) continue;
        const bool takes = candidate.takes_pages_of(page_size) &&
                           std::count(candidate.tile_rows.begin(), candidate.tile_rows.end(), tile_rows) != 0;
        if (expected == nullptr && takes) expected = &candidate;
        if (candidate.name == "generic") generic = &candidate;
      }
      if (expected == nullptr) expected = generic;  // takes the plans of all others
      decode_case.params().variant = expected->number;
      decode_case.run();
      const auto out = decode_case.out();
      const auto lse = decode_case.lse();
      decode_case.params().variant = 0;
      decode_case.run();
      decode_case.verify();
      require(same_bits(out, decode_case.out()) && same_bits(lse, decode_case.lse()),
              shapes.text() + ": the choice was not " + expected->name);
      ++count;
    }
  }
  return std::to_string(count) + " choices";
}

}  // namespace mla::test
