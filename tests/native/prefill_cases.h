// Random prefill problems for a kernel, against float64.
#pragma once

#include "tests/native/prefill_case.h"

namespace mla::test {

struct PrefillTypes {
  DType keys, values;
  bool tiled = false;
};

inline PrefillShape random_shape(Random& random, const std::vector<PrefillTypes>& types, bool key_parts) {
  PrefillShape s;
  const PrefillTypes chosen = types[pick(random, 0, static_cast<int>(types.size()) - 1)];
  s.type = chosen.keys;
  s.value_type = chosen.values;
  s.tiled = chosen.tiled;
  s.causal = pick(random, 0, 2) > 0;
  s.merge = pick(random, 0, 2) == 0;
  s.key_mask = pick(random, 0, 2) == 0;
  s.whole_values = pick(random, 0, 1) == 1;
  if (key_parts && pick(random, 0, 1) == 1) {
    s.nope_width = choose(random, {kNope, 2 * kNope});
    s.rope_width = choose(random, {kRope, kWidth});
  }
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
inline void spoil_values(PrefillCase& problem, Random& random) {
  for (int i = pick(random, 1, 3); i > 0 && problem.stored > 0; --i) {
    problem.spoil_value(pick(random, 0, problem.stored - 1), pick(random, 0, problem.shape.heads - 1),
                        choose(random, {kNaN, kInfinity, -kInfinity}));
  }
}

struct PrefillCases {
  const char* name;
  void (*run)(const PrefillParams& params, Random& random);
  bool any_scale = false;  // negative ones and 0 too
  std::vector<PrefillTypes> types = {{DType::kBF16, DType::kBF16}, {DType::kF16, DType::kF16}};
  bool key_parts = false;  // the kernel takes them, beside whole keys

  // Whatever the lengths say, accesses stay in the arrays. (A run ends, and AddressSanitizer would see one outside.)
  void run_astray(PrefillCase& problem, Random& random) const {
    for (auto* lens : {&problem.cu_q_lens, &problem.cu_kv_lens}) {
      for (int32_t& n : *lens) {
        if (pick(random, 0, 2) == 0) n = choose(random, {-1, INT32_MIN, INT32_MAX, pick(random, -50, 600)});
      }
    }
    run(problem.params(), random);
  }

  void check(PrefillCase& problem, Random& random, double* worst) const {
    problem.prepare(random);
    run(problem.params(), random);
    const std::string wrong = problem.compare(problem.out_tolerance(), problem.lse_tolerance(), worst);
    report.expect(wrong.empty(), wrong + " [" + problem.shape.text() + "]");
    if (problem.in_parts()) check_whole(problem, random);
  }

  // Whole keys give the same bits.
  void check_whole(PrefillCase& problem, Random& random) const {
    const Array out = problem.out;
    const Buffer<float> lse = problem.lse;
    problem.restore();
    run(problem.whole_params(), random);
    const bool same =
        problem.out.bytes == out.bytes && std::memcmp(problem.lse.data(), lse.data(), lse.size() * sizeof(float)) == 0;
    report.expect(same, "keys in parts give other bits [" + problem.shape.text() + "]");
  }

  void run_all(int cases, int seed) const {
    Random random(static_cast<uint32_t>(seed));
    double worst = 0;
    for (int i = 0; i < cases; ++i) {
      PrefillCase problem(random_shape(random, types, key_parts), random);
      if (problem.tokens == 0) continue;
      if (pick(random, 0, 2) == 0) spoil_values(problem, random);
      if (pick(random, 0, 2) == 0) problem.scale = 1.0f;  // few keys have all the weight
      if (any_scale && pick(random, 0, 2) == 0) problem.scale = choose(random, {0.0f, -0.07f, -1.0f});
      if (is_fp8(problem.shape.type) && pick(random, 0, 1) == 0) {
        problem.q_scale = choose(random, {1.5f, 0.5f, -1.0f});
        problem.k_scale = choose(random, {1.0f, 0.7f});
        if (is_fp8(problem.shape.value_type)) problem.v_scale = choose(random, {1.0f, 3.0f, -0.5f});
      }
      check(problem, random, &worst);
      if (pick(random, 0, 3) == 0) run_astray(problem, random);
    }
    char detail[64];
    std::snprintf(detail, sizeof(detail), "worst error of out %.1e", worst);
    report.group(name, detail);
  }
};

}  // namespace mla::test
