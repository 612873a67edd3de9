// What the emulators of the sparse kernels draw, and how they compare.
#pragma once

#include <functional>

#include "tests/native/sm90_emulator/machine.h"
#include "tests/native/sparse_case.h"

namespace mla::test {

// As the reduction on a GPU, row by row.
inline void reduce(SparseCase& problem) {
  const int64_t rows = problem.lse.size();
  for (int64_t row = 0; row < rows; ++row) {
    double highest = -kInfinity, total = 0;
    std::vector<double> sums(kLatent, 0.0);
    const auto lse = [&](int i) { return problem.partial_lse[i * rows + row]; };
    for (int i = 0; i < problem.shape.splits; ++i) highest = std::max<double>(highest, lse(i));
    for (int i = 0; i < problem.shape.splits && highest != -kInfinity; ++i) {
      const double weight = std::exp(lse(i) - highest);
      total += weight;
      for (int c = 0; c < kLatent; ++c) sums[c] += weight * problem.partial_out[(i * rows + row) * kLatent + c];
    }
    problem.lse[row] = static_cast<float>(total == 0 ? -kInfinity : highest + std::log(total));
    const double sink = problem.shape.sink ? std::exp(problem.sink[row % problem.shape.heads] - highest) : 0;
    for (int c = 0; c < kLatent; ++c) problem.out.set(row * kLatent + c, total == 0 ? 0 : sums[c] / (total + sink));
  }
}

// With tiles of one of `tile_rows` heads.
inline SparseShape random_shape(Random& random, const std::vector<int>& tile_rows) {
  SparseShape s;
  s.ds_mla = pick(random, 0, 1) == 0;
  s.cache_type = s.ds_mla ? DType::kE4M3FN : choose(random, {DType::kBF16, DType::kF16, DType::kE4M3FN});
  s.q_type = s.ds_mla ? DType::kBF16 : s.cache_type;
  if (s.cache_type == DType::kE4M3FN && !s.ds_mla) {
    s.q_type = choose(random, {DType::kBF16, DType::kF16, DType::kE4M3FN});
  }
  s.tokens = pick(random, 1, 2);
  s.tile_rows = tile_rows[pick(random, 0, static_cast<int>(tile_rows.size()) - 1)];
  s.heads = choose(random, {1, s.tile_rows - 1, s.tile_rows, s.tile_rows + 1, 2 * s.tile_rows});
  s.topk = choose(random, {1, 63, 64, 65, 192, pick(random, 1, 300)});
  s.slots = choose(random, {3, 64, 300});
  s.splits = choose(random, {1, 1, 2, 3});
  s.layers = choose(random, {1, 1, 3});
  s.layer = pick(random, 0, 9) == 0 ? choose(random, {-1, s.layers, INT32_MAX}) : pick(random, 0, s.layers - 1);
  s.pair = pick(random, 0, 1) == 1;
  s.scales = pick(random, 0, 1) == 1;
  s.sink = pick(random, 0, 1) == 1;
  s.lens = pick(random, 0, 1) == 1;
  s.uneven = pick(random, 0, 2) == 0;
  s.choice = choose(
      random, {Choice::kRandom, Choice::kRandom, Choice::kRandom, Choice::kNothing, Choice::kDuplicates, Choice::kOne});
  return s;
}

// Runs `kernel` over random problems; prints one line.
inline int run_all(const char* name, int cases, int seed, const std::vector<int>& tile_rows,
                   const std::function<void(const SparseDecodeParams&, Random&)>& kernel) {
  Random random(static_cast<uint32_t>(seed));
  emulator::machine.random.seed(static_cast<uint32_t>(seed));
  double worst = 0;
  for (int i = 0; i < cases; ++i) {
    SparseCase problem(random_shape(random, tile_rows), random);
    if (pick(random, 0, 2) == 0) problem.scale = 1.0f;  // maxima grow by more than the softmax's slack
    const auto run = [&](Random choices) {
      problem.poison_results();
      kernel(problem.params(), choices);
      if (problem.shape.splits > 1) reduce(problem);
    };
    const Random choices(random());
    run(choices);
    const std::string wrong = problem.compare(1e-2, 1e-3, &worst);
    report.expect(wrong.empty(), wrong + " [" + problem.shape.text() + "]");
    if (i % 4 != 0) continue;
    const auto out = problem.out.bytes;
    const std::vector<float> lse = problem.lse;
    run(choices);  // the threads take other turns
    report.expect(out == problem.out.bytes && lse == problem.lse, "other bits [" + problem.shape.text() + "]");
  }
  char detail[64];
  std::snprintf(detail, sizeof(detail), "%d cases, worst error of out %.1e", cases, worst);
  report.group(name, detail);
  return report.clean() ? 0 : 1;
}

}  // namespace mla::test
