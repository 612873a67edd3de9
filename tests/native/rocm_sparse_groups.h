// Groups of the ROCm driver: mla_sparse_decode on AMD against float64, in the architecture's own formats.
#pragma once

#include "tests/native/rocm_decode_groups.h"
#include "tests/native/sparse_groups.h"

namespace mla::test {

inline SparseShape amd_sparse_shape(const AmdTypes& types) {
  SparseShape s;
  s.q_type = types.q;
  s.cache_type = types.cache;
  s.ds_mla = types.ds_mla;
  return s;
}

inline SparseShape random_amd_sparse_shape(Random& random, const AmdTypes& types) {
  SparseShape s = random_sparse_shape(random, 0, {types.q, types.cache, types.ds_mla});
  s.tokens = pick(random, 1, 3);
  s.heads = choose(random, {1, 12, 17, 24, 24, 31, 64, 96});
  s.tile_rows = choose(random, {16, 32, 64});
  return s;
}

inline void test_amd_sparse() {
  Random random(31);
  for (const AmdTypes& types : amd_types()) {
    double worst = 0;
    for (int i = 0; i < (quick ? 6 : 60); ++i) {
      SparseCase problem(random_amd_sparse_shape(random, types), random);
      check_sparse(problem, device_with(1), &worst);
    }
    char detail[64];
    std::snprintf(detail, sizeof(detail), "worst relative error %.1e", worst);
    report.group(std::string("sparse decode of ") + test::name_of(types.q) + " over " +
                     (types.ds_mla ? "fp8_ds_mla" : test::name_of(types.cache)),
                 detail);
  }
}

// Layers that do not exist, lengths that mean nothing, no indices and no slots at all; and the same bits in each run.
inline void test_amd_sparse_edges() {
  Random random(32);
  double worst = 0;
  for (const AmdTypes& types : amd_types()) {
    for (int layer : {-1, 2, INT32_MIN, INT32_MAX}) {
      SparseShape s = amd_sparse_shape(types);
      s.layers = 2;
      s.layer = layer;
      s.splits = choose(random, {1, 2});
      SparseCase problem(s, random);
      check_sparse(problem, device_with(1), &worst);
    }
    SparseShape s = amd_sparse_shape(types);
    s.splits = 3;
    s.sink = s.lens = true;
    SparseCase problem(s, random);
    problem.topk_lens[0] = INT32_MIN;
    problem.topk_lens[1] = INT32_MAX;
    check_sparse(problem, device_with(1), &worst);
    const Array out = problem.out;
    const auto lse = problem.lse;
    for (int i = 0; i < 20; ++i) {
      report.expect_success(problem.run(device_with(1)));
      report.expect(out.bytes == problem.out.bytes && std::memcmp(lse.data(), problem.lse.data(), lse.size() * 4) == 0,
                    "other bits in another run: " + s.text());
    }

    SparseShape one = amd_sparse_shape(types);  // of a hundred indices one names a slot
    one.choice = Choice::kOne;
    one.splits = choose(random, {1, 3});
    SparseCase alone(one, random);
    check_sparse(alone, device_with(1), &worst);

    SparseShape chosen = amd_sparse_shape(types);  // a NaN that a token chose is its own, and nobody else's
    chosen.masks = false;
    chosen.splits = choose(random, {1, 2});
    SparseCase poisoned(chosen, random);
    poisoned.indices[7] = 3;
    report.expect_success(poisoned.run(device_with(1)));
    report.expect(std::isnan(poisoned.out.at(0)), "NaN was lost: " + chosen.text());
    bool finite = true;
    for (int64_t i = int64_t{chosen.heads} * kLatent; i < poisoned.out.count(); ++i) {
      finite = finite && std::isfinite(poisoned.out.at(i));
    }
    report.expect(finite, "NaN in another token's row: " + chosen.text());

    SparseShape all = amd_sparse_shape(types);  // of some eight neighbours one names no slot
    all.masks = false;
    SparseCase wrong(all, random);
    for (size_t i = 0; i + 8 <= wrong.indices.size(); i += 8) {
      if (pick(random, 0, 1) == 0) {
        wrong.indices[i + pick(random, 0, 7)] = choose(random, {-1, INT32_MIN, INT32_MAX, static_cast<int>(all.slots)});
      }
    }
    check_sparse(wrong, device_with(1), &worst);

    SparseDecodeParams nothing = problem.params();
    nothing.topk = 0;
    for (int64_t slots : {int64_t{s.slots}, int64_t{0}}) {
      nothing.slots = slots;
      problem.poison_results();
      report.expect_success(sparse_decode(nothing, device_with(1)));
      const bool empty = std::all_of(problem.lse.begin(), problem.lse.end(), [](float x) { return x == -kInfinity; });
      report.expect(empty && problem.out.code(0) == 0, "rows without indices are not empty: " + s.text());
      nothing.topk = s.topk;
    }
  }
  report.group("sparse decode, edges");
}

inline void test_amd_sparse_refusals() {
  Random random(33);
  const std::string here = architecture_here();
  SparseCase problem(amd_sparse_shape({DType::kBF16, DType::kBF16}), random);
  const auto refused = [&](const std::string& words, auto change) {
    SparseDecodeParams p = problem.params();
    change(p);
    const Error error = sparse_decode(p, device_with(1));
    report.expect(error.find(words) != Error::npos, "expected an error with '" + words + "', got '" + error + "'");
  };
  using P = SparseDecodeParams;
  refused("variant is -1, this module has 2", [](P& p) { p.variant = -1; });
  refused("cannot run on device", [&](P& p) { p.variant = here == "gfx942" ? 2 : 1; });
  refused("writes bfloat16, out is float32", [](P& p) { p.out_dtype = DType::kF32; });
  refused("belong to fp8 queries", [&](P& p) { p.q_scale = problem.q_scale.data(); });
  refused("has 3 k_scales, expected 1", [&](P& p) {
    p.cache_dtype = gfx9::own_fp8(here);
    p.k_scale = problem.k_scale.data();
    p.k_scales = 3;
  });
  refused("these are bfloat16 over float16", [](P& p) { p.cache_dtype = DType::kF16; });
  refused("tiles of 1 to 64 heads, these have 65", [](P& p) { p.tile_rows = 65; });
  refused("each must be positive", [](P& p) { p.splits = 0; });
  refused("slots are 32-bit numbers", [](P& p) { p.slots = int64_t{1} << 31; });
  refused("workgroups are more than a grid holds", [](P& p) {
    p.tokens = 1 << 28;
    p.tile_rows = 1;
  });
  report.group("sparse decode, refusals");
}

}  // namespace mla::test
