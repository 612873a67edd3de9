// Tests of sparse_decode on the CPU, one function a group.
#pragma once

#include <cstdio>

#include "tests/native/decode_groups.h"
#include "tests/native/sparse_case.h"

namespace mla::test {

struct SparseTypes {
  DType q, cache;
  bool ds_mla;
};

inline std::vector<SparseTypes> sparse_types() {
  std::vector<SparseTypes> all;
  for (const TypePair& pair : kTypePairs) all.push_back({pair.q, pair.cache, false});
  for (DType q : {DType::kBF16, DType::kF16}) all.push_back({q, DType::kE4M3FN, true});
  return all;
}

inline SparseShape random_sparse_shape(Random& random, int variant, const SparseTypes& types) {
  SparseShape s;
  s.variant = variant;
  s.q_type = types.q;
  s.cache_type = types.cache;
  s.ds_mla = types.ds_mla;
  s.tokens = pick(random, 1, 4);
  s.heads = choose(random, {1, 2, 8, 12, 17, 24, 31, 64, 96, 128, 144});
  s.topk = choose(random, {1, 2, 7, 63, 64, 65, 100, 192, 257, pick(random, 1, 300)});
  s.slots = choose(random, {3, 64, 300});
  s.splits = choose(random, {1, 1, 2, 3, 7});
  s.tile_rows = choose(random, {16, 32, 64, 128, 256});
  s.layers = choose(random, {1, 1, 3});
  s.layer = pick(random, 0, s.layers - 1);
  s.pair = pick(random, 0, 1) == 1;
  s.scales = pick(random, 0, 1) == 1;
  s.sink = pick(random, 0, 1) == 1;
  s.lens = pick(random, 0, 1) == 1;
  s.choice = choose(
      random, {Choice::kRandom, Choice::kRandom, Choice::kRandom, Choice::kNothing, Choice::kDuplicates, Choice::kOne});
  return s;
}

inline void check_sparse(SparseCase& problem, const Device& device, double* worst) {
  const SparseShape& s = problem.shape;
  Error error = problem.run(device);
  if (error.empty()) error = problem.compare(out_tolerance(s.q_type), lse_tolerance(s.q_type), worst);
  report.expect(error.empty(), "sparse decode: " + error + " [" + s.text() + "]");
}

inline void test_sparse_sweep(const Device& device) {
  Random random(21);
  for (int variant : variants_here()) {
    double worst = 0;
    for (const SparseTypes& types : sparse_types()) {
      for (int i = 0; i < (quick ? 3 : 15); ++i) {
        SparseCase problem(random_sparse_shape(random, variant, types), random);
        check_sparse(problem, device, &worst);
      }
    }
    char detail[64];
    std::snprintf(detail, sizeof(detail), "worst relative error %.1e", worst);
    report.group(std::string("sparse decode ") + variants()[variant - 1], detail);
  }
}

inline void test_sparse_layers(const Device& device) {
  Random random(22);
  double worst = 0;
  for (int variant : variants_here()) {
    for (int layer : {-1, 2, INT32_MIN, INT32_MAX}) {
      SparseShape s;
      s.variant = variant;
      s.layers = 2;
      s.layer = layer;
      s.splits = choose(random, {1, 2});
      SparseCase problem(s, random);
      check_sparse(problem, device, &worst);
    }
  }
  report.group("sparse decode, no such layer");
}

// NaN in a token that only one query token chose reaches that one alone.
inline void test_sparse_nan(const Device& device) {
  Random random(23);
  for (int variant : variants_here()) {
    for (const SparseTypes& types : sparse_types()) {
      SparseShape s;
      s.variant = variant;
      s.q_type = types.q;
      s.cache_type = types.cache;
      s.ds_mla = types.ds_mla;
      s.masks = false;
      s.splits = choose(random, {1, 2});
      SparseCase problem(s, random);
      problem.indices[7] = 3;  // poison
      const Error error = problem.run(device);
      const int64_t first_row = int64_t{s.heads} * kLatent;
      report.expect(error.empty() && std::isnan(problem.out.at(0)), "NaN was lost: " + error + s.text());
      for (int64_t i = first_row; i < problem.out.count(); i += 100) {
        if (!std::isfinite(problem.out.at(i))) report.expect(false, "NaN in another token's row: " + s.text());
      }
    }
  }
  report.group("sparse decode, NaN that one chose");
}

inline void test_sparse_determinism() {
  Random random(24);
  for (int variant : variants_here()) {
    for (const SparseTypes& types : sparse_types()) {
      SparseCase problem(random_sparse_shape(random, variant, types), random);
      problem.run(device_with(1));
      const Array out = problem.out;
      const auto lse = problem.lse;
      for (int i = 0; i < (quick ? 5 : 20); ++i) {
        const int threads = 1 + i % 5;
        problem.run(device_with(threads));
        report.expect(
            out.bytes == problem.out.bytes && std::memcmp(lse.data(), problem.lse.data(), lse.size() * 4) == 0,
            "other bits with " + std::to_string(threads) + " threads: " + problem.shape.text());
      }
    }
  }
  report.group("sparse decode, same bits again");
}

}  // namespace mla::test
