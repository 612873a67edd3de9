// The Hopper prefill kernel on a machine without a GPU: its source, compiled for the host over an emulated CTA
// (machine.h), against float64. What this cannot show: the meaning of the real instructions, time, and registers.
//   mla_sm90_prefill_emulator [cases] [seed]
#define MLA_EMULATED sm90_prefill
#include "kernels/prefill/sm90/kernel.cuh"
// The kernel's headers come first, so that they find the emulator's vocabulary.
#include "kernels/prefill/sm90/grouping.h"
#include "kernels/prefill/sm90/limits.h"
#include "tests/native/prefill_case.h"
#include "tests/native/sm90_emulator/describe.h"

namespace mla::sm90_prefill {
alignas(1024) unsigned char shared_base[emulator::kSharedBytes];
}

namespace mla::test {
namespace {

using emulator::machine;

// As kernels/prefill/sm90/prefill.cu does.
sm90_prefill::TensorMaps describe(const PrefillParams& p) {
  sm90_prefill::TensorMaps maps{};
  const auto array = [&](CUtensorMap* map, const void* data, int64_t tokens, int64_t stride, int32_t chunks,
                         int32_t box) {
    emulator::describe(
        map, data, {{64, 0, 64}, {tokens, p.heads * stride * 2, box}, {chunks, 128, chunks}, {p.heads, stride * 2, 1}});
  };
  array(&maps.queries, p.q, p.tokens, kHeadDim, 3, sm90_prefill::kGroupQueries);
  array(&maps.keys, p.k, p.stored, kHeadDim, 3, sm90_prefill::kBlockKeys);
  array(&maps.values, static_cast<const char*>(p.v) + p.v_offset * 2, p.stored, p.v_stride, 2,
        sm90_prefill::kBlockKeys);
  return maps;
}

template <class Element, bool kKeyMask>
void run_kernel(const PrefillParams& p, int32_t ctas) {
  const sm90_prefill::TensorMaps maps = describe(p);
  const sm90_prefill::Schedule schedule = sm90_prefill::schedule_of(p, ctas);
  machine.blocks = static_cast<uint32_t>(ctas);
  for (int32_t cta = 0; cta < ctas; ++cta) {
    const bool ended = machine.run(static_cast<uint32_t>(cta), sm90_prefill::kThreads,
                                   [&] { sm90_prefill::prefill_kernel<Element, kKeyMask>(p, maps, schedule); });
    if (!ended) {
      std::fprintf(stderr, "the emulated kernel hangs in CTA %d\n", cta);
      std::abort();
    }
  }
}

void run(const PrefillParams& p, int32_t ctas) {
  report.expect(sm90_prefill::takes(p), "the kernel refuses this");
  const bool masked = p.key_mask != nullptr;
  if (p.dtype == DType::kF16) {
    masked ? run_kernel<__half, true>(p, ctas) : run_kernel<__half, false>(p, ctas);
  } else {
    masked ? run_kernel<__nv_bfloat16, true>(p, ctas) : run_kernel<__nv_bfloat16, false>(p, ctas);
  }
}

PrefillShape random_shape(Random& random) {
  PrefillShape s;
  s.type = choose(random, {DType::kBF16, DType::kF16});
  s.causal = pick(random, 0, 2) > 0;
  s.merge = pick(random, 0, 2) == 0;
  s.key_mask = pick(random, 0, 2) == 0;
  s.whole_values = pick(random, 0, 1) == 1;
  s.q_gap = choose(random, {0, 0, 3});
  s.kv_gap = choose(random, {0, 0, 5});
  const bool many = pick(random, 0, 3) == 0;  // short requests, so that the roles are tiles apart
  s.heads = many ? choose(random, {1, 3}) : pick(random, 1, 2);
  for (int b = many ? pick(random, 6, 40) : pick(random, 1, 3); b > 0; --b) {
    const int queries = many ? pick(random, 0, 5) : choose(random, {0, 1, 64, 65, 128, pick(random, 1, 200)});
    const int keys = many ? pick(random, 0, 40) : choose(random, {0, 128, queries, queries, pick(random, 1, 500)});
    s.q_lens.push_back(queries);
    s.kv_lens.push_back(keys);
  }
  return s;
}

// Values that are not finite, each seen by some queries alone where the mask is causal.
void spoil_values(PrefillCase& problem, Random& random) {
  for (int i = pick(random, 1, 3); i > 0 && problem.stored > 0; --i) {
    problem.spoil_value(pick(random, 0, problem.stored - 1), pick(random, 0, problem.shape.heads - 1),
                        choose(random, {kNaN, kInfinity, -kInfinity}));
  }
}

// Whatever the lengths say, accesses stay in the arrays. (A run ends, and AddressSanitizer would see one outside.)
void run_astray(PrefillCase& problem, Random& random, int32_t ctas) {
  for (auto* lens : {&problem.cu_q_lens, &problem.cu_kv_lens}) {
    for (int32_t& n : *lens) {
      if (pick(random, 0, 2) == 0) n = choose(random, {-1, INT32_MIN, INT32_MAX, pick(random, -50, 600)});
    }
  }
  run(problem.params(), ctas);
}

int run_all(int cases, uint32_t seed) {
  Random random(seed);
  machine.random.seed(seed);
  double worst = 0;
  for (int i = 0; i < cases; ++i) {
    PrefillCase problem(random_shape(random), random);
    if (problem.tokens == 0) continue;
    if (pick(random, 0, 2) == 0) spoil_values(problem, random);
    if (pick(random, 0, 2) == 0) problem.scale = 1.0f;  // few keys have all the weight
    problem.prepare(random);
    const int32_t ctas = sm90_prefill::cta_count(problem.params(), pick(random, 1, 5));
    run(problem.params(), ctas);
    const double tolerance = problem.shape.type == DType::kF16 ? 2e-3 : 1e-2;
    const std::string wrong = problem.compare(tolerance, 1e-3, &worst);
    report.expect(wrong.empty(), wrong + " [" + problem.shape.text() + "]");
    if (pick(random, 0, 3) == 0) run_astray(problem, random, ctas);
  }
  char detail[64];
  std::snprintf(detail, sizeof(detail), "worst error of out %.1e", worst);
  report.group("the Hopper prefill kernel, emulated", detail);
  return report.clean() ? 0 : 1;
}

}  // namespace
}  // namespace mla::test

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 60;
  const int seed = argc > 2 ? std::atoi(argv[2]) : 1;
  return mla::test::run_all(cases, static_cast<uint32_t>(seed));
}
