// The Hopper prefill kernel on a machine without a GPU: its source, compiled for the host over an emulated CTA
// (machine.h), against float64. What this cannot show: the meaning of the real instructions, time, and registers.
//   mla_sm90_prefill_emulator [cases] [seed]
#define MLA_EMULATED sm90_prefill
#include "kernels/prefill/sm90/kernel.cuh"
// The kernel's headers come first, so that they find the emulator's vocabulary.
#include "kernels/prefill/parts.h"
#include "kernels/prefill/sm90/grouping.h"
#include "kernels/prefill/sm90/limits.h"
#include "tests/native/prefill_cases.h"
#include "tests/native/sm90_emulator/describe.h"

namespace mla::sm90_prefill {
alignas(1024) unsigned char shared_base[emulator::kSharedBytes];
}

namespace mla::test {
namespace {

using emulator::machine;

// As kernels/prefill/sm90/prefill.cu does.
template <class Format>
sm90_prefill::TensorMaps describe(const PrefillParams& p) {
  constexpr int32_t kKeySize = sizeof(typename Format::Key), kValueSize = sizeof(typename Format::Value);
  sm90_prefill::TensorMaps maps{};
  const auto array = [&](CUtensorMap* map, const ArrayPart& part, int32_t size, int64_t tokens, int32_t chunks,
                         int32_t box) {
    const int64_t token_bytes = part.token_stride * size, head_bytes = part.head_stride * size;
    const bool shared = part.head_stride == 0;
    emulator::describe(map, static_cast<const char*>(part.data) + part.offset * size,
                       {{64, 0, 64},
                        {tokens, token_bytes, box},
                        {chunks, 64 * size, chunks},
                        {shared ? 1 : p.heads, shared ? token_bytes : head_bytes, 1}},
                       size);
  };
  const ArrayPart queries{p.q, 0, int64_t{p.heads} * kHeadDim, kHeadDim};
  array(&maps.queries, queries, kKeySize, p.tokens, 3, sm90_prefill::kGroupQueries);
  array(&maps.nope, nope_part(p), kKeySize, p.stored, 2, sm90_prefill::kBlockKeys);
  array(&maps.rope, rope_part(p), kKeySize, p.stored, 1, sm90_prefill::kBlockKeys);
  if (!Format::kFp8Values) array(&maps.values, value_part(p), kValueSize, p.stored, 2, sm90_prefill::kBlockKeys);
  return maps;
}

template <class Format, bool kKeyMask>
void run_masked(const PrefillParams& p, int32_t ctas, int32_t fast_rounds) {
  const sm90_prefill::TensorMaps maps = describe<Format>(p);
  sm90_prefill::Schedule schedule = sm90_prefill::schedule_of(p, ctas);
  schedule.fast_rounds = std::min(schedule.fast_rounds, fast_rounds);
  machine.blocks = static_cast<uint32_t>(ctas);
  for (int32_t cta = 0; cta < ctas; ++cta) {
    const bool ended = machine.run(static_cast<uint32_t>(cta), sm90_prefill::kThreads,
                                   [&] { sm90_prefill::prefill_kernel<Format, kKeyMask>(p, maps, schedule); });
    if (!ended) {
      std::fprintf(stderr, "the emulated kernel hangs in CTA %d\n", cta);
      std::abort();
    }
  }
}

template <class Key, class Value>
void run_typed(const PrefillParams& p, int32_t ctas, int32_t fast_rounds) {
  using Format = sm90_prefill::Format<Key, Value>;
  p.key_mask != nullptr ? run_masked<Format, true>(p, ctas, fast_rounds)
                        : run_masked<Format, false>(p, ctas, fast_rounds);
}

void run_kernel(const PrefillParams& p, int32_t ctas, int32_t fast_rounds) {
  switch (p.dtype) {
    case DType::kF16: return run_typed<__half, __half>(p, ctas, fast_rounds);
    case DType::kBF16: return run_typed<__nv_bfloat16, __nv_bfloat16>(p, ctas, fast_rounds);
    default: break;
  }
  p.v_tiled ? run_typed<E4M3FN, E4M3FN>(p, ctas, fast_rounds) : run_typed<E4M3FN, __nv_bfloat16>(p, ctas, fast_rounds);
}

// What a call reads and writes, or writes: out and lse.
struct Results {
  std::vector<char> out;
  std::vector<float> lse;

  explicit Results(const PrefillParams& p) {
    const auto* first = static_cast<const char*>(p.out);
    out.assign(first, first + int64_t{p.tokens} * p.heads * kNope * size_of(p.out_dtype));
    lse.assign(p.lse, p.lse + int64_t{p.tokens} * p.heads);
  }
  void restore(const PrefillParams& p) const {
    std::copy(out.begin(), out.end(), static_cast<char*>(p.out));
    std::copy(lse.begin(), lse.end(), p.lse);
  }
  bool operator==(const Results& other) const {
    return out == other.out && std::memcmp(lse.data(), other.lse.data(), lse.size() * sizeof(float)) == 0;
  }
};

// Few or all tiles are fast ones, and those in which that fails come twice. Sometimes all are careful ones before,
// which has to give the same bits (where requests do not overlap, since then the last to write a row wins).
void run(const PrefillParams& p, Random& random) {
  const int32_t ctas = sm90_prefill::cta_count(p, pick(random, 1, 5));
  report.expect(sm90_prefill::takes(p), "the kernel refuses this");
  const int32_t fast_rounds = choose(random, {sm90_prefill::kFastRounds, sm90_prefill::kFastRounds, 0, 1, 2, 33});
  const bool apart = std::is_sorted(p.cu_q_lens, p.cu_q_lens + p.batch + 1);
  if (!apart || pick(random, 0, 2) != 0) return run_kernel(p, ctas, fast_rounds);
  const Results before(p);
  run_kernel(p, ctas, /*fast_rounds=*/0);
  const Results careful(p);
  before.restore(p);
  run_kernel(p, ctas, fast_rounds);
  report.expect(Results(p) == careful, "a careful tile differs from a fast one");
}

}  // namespace
}  // namespace mla::test

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 60;
  const int seed = argc > 2 ? std::atoi(argv[2]) : 1;
  using mla::DType;
  mla::test::PrefillCases alike{"the Hopper prefill kernel, emulated", mla::test::run};
  alike.key_parts = true;
  mla::test::PrefillCases mixed{"the same of e4m3fn with values in bf16", mla::test::run, /*any_scale=*/true};
  mixed.types = {{DType::kE4M3FN, DType::kBF16}};
  mla::test::PrefillCases tiled{"the same all in e4m3fn", mla::test::run, /*any_scale=*/true};
  tiled.types = {{DType::kE4M3FN, DType::kE4M3FN, /*tiled=*/true}};
  for (const auto* group : {&alike, &mixed, &tiled}) {
    mla::emulator::machine.random.seed(static_cast<uint32_t>(seed));
    group->run_all(cases, seed);
  }
  return mla::test::report.clean() ? 0 : 1;
}
