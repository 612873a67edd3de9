// What the decode emulators draw and spoil alike.
#pragma once

#include <cstdlib>

#include "kernels/decode/cpu/reduce.h"
#include "tests/native/decode_case.h"
#include "tests/native/sm90_emulator/machine.h"

namespace mla::test {

// The lengths, and all that does not depend on the kernel. `s` has its heads, queries and pages.
inline void draw_batch(DecodeShape& s, Random& random) {
  s.parts = pick(random, 1, 6);
  s.causal = pick(random, 0, 3) > 0;
  s.pair = pick(random, 0, 1) == 1;
  s.batch_invariant = pick(random, 0, 3) == 0;
  s.layers = choose(random, {1, 1, 3});
  s.layer = pick(random, 0, 9) == 0 ? choose(random, {-1, s.layers}) : pick(random, 0, s.layers - 1);
  s.ragged = pick(random, 0, 1) == 1;
  const bool short_ones = pick(random, 0, 3) == 0;  // one block each: the roles are items apart
  for (int b = short_ones ? 12 : pick(random, 1, 5); b > 0; --b) {
    const int longer = choose(random, {-1, 0, 65, pick(random, 1, 200), pick(random, 60, 700)});
    s.kv_lens.push_back(short_ones ? pick(random, 1, 64) : choose(random, {longer, longer, 1, 63, 64}));
    s.q_lens.push_back(s.ragged ? pick(random, 0, s.max_q_len) : s.max_q_len);
  }
  s.extra_tokens = s.ragged ? pick(random, 1, 2) : 0;
}

inline void lead_astray(DecodeCase& problem, Random& random) {
  for (int32_t& page : problem.page_table) {
    if (pick(random, 0, 3) == 0) page = choose(random, {-1, problem.pages, INT32_MAX, INT32_MIN});
  }
}

// NaN in the last token of a request, somewhere in its latent or, of fp8_ds_mla, among its scales: the queries that do
// not see it give the same bits, the last one gives NaN. `run`: the problem once more. For caches in fp8, whose codes
// of 0xFF are NaN.
template <class Run>
void hide_nan(DecodeCase& problem, const std::string& text, Run run) {
  const DecodeShape& s = problem.shape;
  if (!s.causal || s.layer < 0 || s.layer >= s.layers) return;
  const std::vector<unsigned char> out = problem.out.bytes;
  for (int b = 0; b < s.batch(); ++b) {
    const int64_t queries = s.ragged ? s.q_lens[b] : s.max_q_len, first = s.ragged ? problem.cu_q_lens[b] : b * queries;
    const int64_t slot = s.kv_lens[b] > queries ? problem.slot_of(b, s.kv_lens[b] - 1) : -1;
    if (slot < 0 || queries == 0) continue;
    const int64_t token = int64_t{s.layer} * problem.pages * s.page_size + slot;
    unsigned char* const poisoned = s.ds_mla && b % 2 == 0
                                        ? problem.cache.bytes.data() + token * kDsMlaBytes + kLatent + b % 4 * 4
                                        : problem.cache.bytes.data() + token * (s.ds_mla ? kDsMlaBytes : kWidth);
    unsigned char kept[4];
    std::memcpy(kept, poisoned, sizeof(kept));
    std::memset(poisoned, 0xFF, sizeof(kept));
    run();
    const int64_t row_bytes = int64_t{s.heads} * kLatent * 2, seen = (first + queries - 1) * row_bytes;
    const auto& now = problem.out.bytes;
    const bool same = std::equal(out.begin(), out.begin() + seen, now.begin()) &&
                      std::equal(out.begin() + seen + row_bytes, out.end(), now.begin() + seen + row_bytes);
    report.expect(same, "NaN leaks: " + text);
    bool shows = true;
    for (int64_t i = 0; i < s.heads * kLatent; ++i) shows = shows && std::isnan(problem.out.at(seen / 2 + i));
    report.expect(shows, "NaN is lost: " + text);
    std::memcpy(poisoned, kept, sizeof(kept));
    break;
  }
}

// Whatever a plan holds, accesses stay in the arrays. (A run ends, and AddressSanitizer would see an access outside.)
inline void spoil(DecodeCase& problem, Random& random) {
  const bool wide = pick(random, 0, 1) == 1;
  const auto wild = [&] { return wide ? pick(random, INT32_MIN, INT32_MAX) : pick(random, -2, 6); };
  for (WorkItem& item : problem.items) {
    item = {wild(), wild(), choose(random, {64 * pick(random, -1, 4), wild()}), pick(random, -100, 300), wild(), {}};
  }
  for (int32_t& offset : problem.part_offsets) offset = wild();
}

// The random cases of a kernel, and a program that runs them: NAME [cases] [seed].
struct DecodeCases {
  const char* name;
  DecodeShape (*draw)(Random& random);
  void (*attend)(const DecodeParams& p, Random& random);  // the kernel, an instance chosen at random; over all parts
  bool (*hides_nan)(const DecodeShape& shape);            // whether a hidden token's NaN reaches nobody

  // The same instance for the same state of `random`, which is a copy.
  void run(DecodeCase& problem, const Device& device, Random random) const {
    problem.out.fill_nan();
    for (auto* values : {&problem.lse, &problem.partial_out, &problem.partial_lse}) {
      std::fill(values->begin(), values->end(), kNaN);
    }
    const DecodeParams p = problem.params();
    attend(p, random);
    cpu::reduce(p, device);
  }

  int main(int argc, char** argv) const {
    const int cases = argc > 1 ? std::atoi(argv[1]) : 60;
    const auto seed = static_cast<uint32_t>(argc > 2 ? std::atoi(argv[2]) : 1);
    const Device device = device_with(1);
    Random random(seed);
    emulator::machine.random.seed(seed);
    double worst = 0;
    for (int i = 0; i < cases; ++i) {
      DecodeCase problem(draw(random), random);
      const std::string text = problem.shape.text();
      if (pick(random, 0, 2) == 0) lead_astray(problem, random);
      if (pick(random, 0, 2) == 0) problem.scale = 3.0f;  // maxima grow by more than the softmax's slack
      report.expect(problem.make_plan(device).empty(), text);
      const Random choices = random;
      run(problem, device, choices);
      const double tolerance = problem.out_type() == DType::kF16 ? 2e-3 : 1e-2;
      const std::string wrong = problem.compare(tolerance, 1e-3, &worst);
      report.expect(wrong.empty(), wrong + " [" + text + "]");
      if (hides_nan(problem.shape)) hide_nan(problem, text, [&] { run(problem, device, choices); });
      if (pick(random, 0, 3) == 0) {
        spoil(problem, random);
        run(problem, device, choices);
      }
    }
    char detail[64];
    std::snprintf(detail, sizeof(detail), "%d cases, worst error of out %.1e", cases, worst);
    report.group(name, detail);
    return report.clean() ? 0 : 1;
  }
};

}  // namespace mla::test
