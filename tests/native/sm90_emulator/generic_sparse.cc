// The generic sparse kernel on a machine without a GPU: its source, compiled for the host over an emulated CTA
// (machine.h), against float64. What this cannot show: the meaning of the real instructions, time, and registers.
//   mla_generic_sparse_emulator [cases] [seed]
#define MLA_EMULATED generic_sparse
#include "tests/native/sm90_emulator/fp8_halves.h"
// The kernel's headers come first, so that they find the emulator's vocabulary.
#include "kernels/sparse/generic/kernel.cuh"
#include "tests/native/sparse_case.h"

namespace mla::generic_sparse {
alignas(1024) unsigned char shared_base[emulator::kSharedBytes];
}

namespace mla::test {
namespace {

using emulator::machine;
using generic_sparse::DsMla;

template <class Cached, int kRows, int kTokens>
void run_shape(const SparseDecodeParams& p, Random& random) {
  using Element = typename generic_sparse::Multiplied<Cached>::Type;
  using Shape = DecodeShape<kRows, kTokens, sizeof(Element), std::is_same_v<Cached, DsMla>>;
  int most = kMaxStages;
  while (generic_sparse::sparse_shared_bytes<Cached, Shape>(most) > emulator::kSharedBytes) --most;
  const int stages = pick(random, 2, most);
  const int ctas = p.tokens * ((p.heads + p.tile_rows - 1) / p.tile_rows) * p.splits;
  for (int cta = 0; cta < ctas; ++cta) {
    const bool ended = machine.run(static_cast<uint32_t>(cta), Shape::kThreads,
                                   [&] { generic_sparse::sparse_kernel<Cached, Shape>(p, stages); });
    if (ended) continue;
    std::fprintf(stderr, "the emulated kernel hangs in CTA %d\n", cta);
    std::abort();
  }
}

template <class Cached>
void run(const SparseDecodeParams& p, Random& random) {
  switch (p.tile_rows) {
    case 16:
      return pick(random, 0, 1) == 0 ? run_shape<Cached, 16, 64>(p, random) : run_shape<Cached, 16, 32>(p, random);
    case 32:
      return pick(random, 0, 1) == 0 ? run_shape<Cached, 32, 64>(p, random) : run_shape<Cached, 32, 32>(p, random);
    default: return run_shape<Cached, 64, 32>(p, random);
  }
}

void run(const SparseDecodeParams& p, Random& random) {
  if (p.ds_mla) return run<DsMla>(p, random);
  switch (p.cache_dtype) {
    case DType::kBF16: return run<__nv_bfloat16>(p, random);
    case DType::kF16: return run<__half>(p, random);
    default: return run<E4M3FN>(p, random);
  }
}

// As the reduction on a GPU, row by row.
void reduce(SparseCase& problem) {
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

SparseShape random_shape(Random& random) {
  SparseShape s;
  s.ds_mla = pick(random, 0, 1) == 0;
  s.cache_type = s.ds_mla ? DType::kE4M3FN : choose(random, {DType::kBF16, DType::kF16, DType::kE4M3FN});
  s.q_type = s.ds_mla ? DType::kBF16 : s.cache_type;
  if (s.cache_type == DType::kE4M3FN && !s.ds_mla) {
    s.q_type = choose(random, {DType::kBF16, DType::kF16, DType::kE4M3FN});
  }
  s.tokens = pick(random, 1, 2);
  s.tile_rows = choose(random, {16, 32, 64});
  s.heads = choose(random, {1, s.tile_rows - 1, s.tile_rows, s.tile_rows + 1});
  s.topk = choose(random, {1, 63, 64, 65, 192, pick(random, 1, 300)});
  s.slots = choose(random, {3, 64, 300});
  s.splits = choose(random, {1, 1, 2, 3});
  s.layers = choose(random, {1, 1, 3});
  s.layer = pick(random, 0, 9) == 0 ? choose(random, {-1, s.layers, INT32_MAX}) : pick(random, 0, s.layers - 1);
  s.pair = pick(random, 0, 1) == 1;
  s.scales = pick(random, 0, 1) == 1;
  s.sink = pick(random, 0, 1) == 1;
  s.lens = pick(random, 0, 1) == 1;
  s.choice = choose(random, {Choice::kRandom, Choice::kRandom, Choice::kRandom, Choice::kNothing, Choice::kDuplicates});
  return s;
}

void run_all(int cases, int seed) {
  Random random(static_cast<uint32_t>(seed));
  machine.random.seed(static_cast<uint32_t>(seed));
  double worst = 0;
  for (int i = 0; i < cases; ++i) {
    SparseCase problem(random_shape(random), random);
    problem.poison_results();
    run(problem.params(), random);
    if (problem.shape.splits > 1) reduce(problem);
    const std::string wrong = problem.compare(1e-2, 1e-3, &worst);
    report.expect(wrong.empty(), wrong + " [" + problem.shape.text() + "]");
  }
  char detail[64];
  std::snprintf(detail, sizeof(detail), "worst error of out %.1e", worst);
  report.group("the generic sparse kernel, emulated", detail);
}

}  // namespace
}  // namespace mla::test

int main(int argc, char** argv) {
  mla::test::run_all(argc > 1 ? std::atoi(argv[1]) : 40, argc > 2 ? std::atoi(argv[2]) : 1);
  return mla::test::report.clean() ? 0 : 1;
}
