// The driver's groups for mla_prefill, by one of its kernels.
#pragma once

#include "kernels/capability.h"
#include "tests/native/cuda_prefill_case.h"

namespace mla::test {

// A row of the table each, the best first.
inline const std::vector<PrefillVariant>& prefill_variants() {
  static const std::vector<PrefillVariant> kVariants = [] {
    int32_t major = 0, minor = 0;
    check(device_attribute(&major, cudaDevAttrComputeCapabilityMajor, device()));
    check(device_attribute(&minor, cudaDevAttrComputeCapabilityMinor, device()));
    const std::vector<const char*> names = variants();
    std::vector<PrefillVariant> all;
    for (const Capability& row : capabilities()) {
      const std::string architecture = row.architecture, name = row.variant;
      const bool runs = architecture.back() == '+' || architecture == "sm_" + std::to_string(major * 10 + minor);
      if (row.operation != std::string("mla_prefill") || !runs) continue;
      const auto position = std::find(names.begin(), names.end(), name);
      require(position != names.end(), "variants() lacks " + name);
      const bool tiled = row.cache_dtype == std::string("kernel_values");
      all.push_back({name, static_cast<int32_t>(position - names.begin()) + 1, !row.positive_scale,
                     dtype_named(row.q_dtype), tiled ? DType::kE4M3FN : dtype_named(row.cache_dtype), tiled});
    }
    return all;
  }();
  return kVariants;
}

// Whether "prefill", "prefill:NAME", "prefill:NAME,DTYPES" or nothing means this one.
inline bool selected(const PrefillVariant& variant, const std::string& only) {
  const std::string name = "prefill:" + variant.name;
  return only.empty() || only == "prefill" || only == name || only == name + "," + variant.dtypes();
}

inline PrefillShapes random_prefill(const PrefillVariant& variant, Random& random, bool quick) {
  PrefillShapes s;
  s.variant = variant;
  s.seed = random();
  s.causal = pick(random, 0, 2) > 0;
  s.merge = pick(random, 0, 2) == 0;
  s.key_mask = pick(random, 0, 2) == 0;
  s.whole_values = pick(random, 0, 1);
  s.bad_values = pick(random, 0, 3) == 0;
  if (!variant.fp8() && pick(random, 0, 1)) {
    s.nope_width = pick(random, 0, 1) ? kNope : 2 * kNope;
    s.rope_width = pick(random, 0, 1) ? kRope : kWidth;
  }
  s.heads = pick(random, 0, 1) ? 24 : pick(random, 1, quick ? 8 : 128);
  s.q_gap = pick(random, 0, 2) ? 0 : pick(random, 1, 200);
  s.kv_gap = pick(random, 0, 2) ? 0 : pick(random, 1, 200);
  if (pick(random, 0, 2) == 0) s.scale = 1.0f;
  if (variant.fp8() && pick(random, 0, 2) > 0) {
    const float scales[] = {1.5f, 0.5f, -1.0f};
    s.q_scale = scales[pick(random, 0, 2)];
    s.k_scale = 0.7f;
    if (variant.tiled) s.v_scale = pick(random, 0, 1) ? 3.0f : -0.5f;
  }
  const float others[] = {0.0f, -0.07f, -1.0f};
  if (variant.any_scale && pick(random, 0, 2) == 0) s.scale = others[pick(random, 0, 2)];
  const bool many = pick(random, 0, 2) == 0;
  s.q_lens.clear();
  s.kv_lens.clear();
  for (int32_t b = many ? pick(random, 5, quick ? 40 : 300) : pick(random, 1, 4); b > 0; --b) {
    const int32_t edges[] = {0, 1, 64, 65, 128, 129, 256};
    const int32_t queries = many                 ? pick(random, 0, 9)
                            : pick(random, 0, 2) ? pick(random, 1, quick ? 300 : 1500)
                                                 : edges[pick(random, 0, 6)];
    const int32_t others = pick(random, 0, 1) ? pick(random, 0,
                                                     many    ? 60
                                                     : quick ? 400
                                                             : 2500)
                                              : edges[pick(random, 0, 6)];
    s.q_lens.push_back(queries);
    s.kv_lens.push_back(pick(random, 0, 2) ? others : queries);
  }
  return s;
}

// Keys in parts give the bits of whole ones.
inline std::string prefill_group(const PrefillVariant& variant, bool quick) {
  Random random(17);
  const int count = quick ? 8 : 150;
  double worst = 0;
  for (int i = 0; i < count; ++i) {
    const PrefillShapes s = random_prefill(variant, random, quick);
    PrefillCase problem(s);
    problem.run();
    worst = std::max(worst, problem.verify());
    if (s.nope_width == 0) continue;
    const std::vector<uint8_t> out = problem.out();
    const std::vector<float> lse = problem.lse();
    problem.run_whole();
    require(problem.out() == out && same_bits(problem.lse(), lse), "keys in parts give other bits; " + s.text());
  }
  char text[64];
  std::snprintf(text, sizeof(text), "%d calls, worst error %.1e", count, worst);
  return text;
}

inline std::string prefill_long_group(const PrefillVariant& variant, bool quick) {
  if (quick) return "left out";
  double worst = 0;
  const auto verify = [&](PrefillShapes s) {
    PrefillCase problem(s);
    problem.run();
    worst = std::max(worst, problem.verify());
  };
  PrefillShapes s;
  s.variant = variant;
  s.heads = 3;
  s.q_lens = s.kv_lens = {8192};
  verify(s);
  s.q_lens = {300};
  s.kv_lens = {40000};
  verify(s);
  s.causal = false;
  verify(s);
  s.q_lens.assign(1024, 3);
  s.kv_lens.assign(1024, 200);
  verify(s);
  // Elements past 2^31: of the keys, and of the whole up-projection.
  s = {};
  s.variant = variant;
  s.heads = 128;
  s.whole_values = true;
  s.q_lens = {70};
  s.kv_lens = {300};
  s.kv_gap = 90000;
  verify(s);
  if (!variant.fp8()) {
    s.nope_width = 2 * kNope;
    s.rope_width = kWidth;
    verify(s);
  }
  char text[64];
  std::snprintf(text, sizeof(text), "worst error %.1e", worst);
  return text;
}

inline std::string prefill_repeats_group(const PrefillVariant& variant, bool quick) {
  PrefillShapes s;
  s.variant = variant;
  s.q_lens = {700, 1, 0, 130};
  s.kv_lens = {900, 1, 50, 100};
  for (bool merge : {false, true}) {
    s.merge = merge;
    PrefillCase problem(s);
    problem.run();
    const std::vector<uint8_t> out = problem.out();
    const std::vector<float> lse = problem.lse();
    for (int i = 0; i < (quick ? 2 : 20); ++i) {
      problem.run();
      require(problem.out() == out && same_bits(problem.lse(), lse), "mla_prefill's bits change from call to call");
    }
  }
  return "the same bits";
}

// Lengths that lead nowhere: the call ends, and writes no row that is not there.
inline std::string prefill_lengths_group(const PrefillVariant& variant, bool quick) {
  Random random(23);
  const int count = quick ? 4 : 60;
  for (int i = 0; i < count; ++i) {
    PrefillShapes s = random_prefill(variant, random, /*quick=*/true);
    s.merge = false;
    PrefillCase problem(s);
    const size_t batch = s.q_lens.size();
    std::vector<int32_t> q_lens(batch + 1), kv_lens(batch + 1);
    for (auto* lens : {&q_lens, &kv_lens}) {
      for (int32_t& n : *lens) {
        n = pick(random, 0, 3) ? pick(random, -100, 2000) : pick(random, INT32_MIN, INT32_MAX);
      }
    }
    const Array<int32_t> cu_q_lens(q_lens), cu_kv_lens(kv_lens);
    problem.params().cu_q_lens = cu_q_lens.data();
    problem.params().cu_kv_lens = cu_kv_lens.data();
    problem.run();
    synchronize();
    problem.verify_guards();
  }
  return std::to_string(count) + " calls";
}

inline std::string prefill_refusals_group(const PrefillVariant& variant, bool) {
  PrefillShapes s;
  s.variant = variant;
  PrefillCase problem(s);
  const auto refuses = [&](const char* text, PrefillParams p) {
    const Error error = prefill(p, device());
    require(error.find(text) != std::string::npos, std::string("no word of ") + text + " in: " + error);
  };
  PrefillParams p = problem.params();
  p.scale = 0;
  if (!variant.any_scale) refuses("scale > 0", p);
  p = problem.params();
  p.variant = 9;
  refuses("variant is 9", p);
  p = problem.params();
  p.dtype = p.v_dtype = p.out_dtype = DType::kF32;
  p.v_tiled = false;
  p.q_scale = p.k_scale = nullptr;
  refuses("takes bfloat16 and float16", p);
  p = problem.params();
  p.out_dtype = DType::kF32;
  refuses("writes", p);
  p = problem.params();
  p.k_pe = p.k;
  if (variant.fp8()) refuses("takes keys as one array", p);
  const Array<float> v_scale(std::vector<float>{2});
  p = problem.params();
  p.v_scale = v_scale.data();
  if (!variant.tiled) refuses("v_scale belong to fp8", p);
  return "refused with words";
}

// Left to the entry: whatever the scale, a kernel that takes it.
inline std::string prefill_choice_group(bool) {
  PrefillShapes s;
  s.q_lens = {300, 5};
  s.kv_lens = {400, 5};
  for (float scale : {0.072168784f, 0.0f, -0.5f}) {
    s.scale = scale;
    PrefillCase problem(s);
    problem.run();
    problem.verify();
  }
  return "3 scales";
}

}  // namespace mla::test
