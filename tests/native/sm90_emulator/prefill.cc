// The Hopper prefill kernel on a machine without a GPU: its source, compiled for the host over an emulated CTA
// (machine.h), against float64. What this cannot show: the meaning of the real instructions, time, and registers.
//   mla_sm90_prefill_emulator [cases] [seed]
#define MLA_EMULATED sm90_prefill
#include "kernels/prefill/sm90/kernel.cuh"
// The kernel's headers come first, so that they find the emulator's vocabulary.
#include "kernels/prefill/sm90/grouping.h"
#include "kernels/prefill/sm90/limits.h"
#include "tests/native/sm90_emulator/describe.h"
#include "tests/native/sm90_emulator/prefill_cases.h"

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

void run(const PrefillParams& p, Random& random) {
  const int32_t ctas = sm90_prefill::cta_count(p, pick(random, 1, 5));
  report.expect(sm90_prefill::takes(p), "the kernel refuses this");
  const bool masked = p.key_mask != nullptr;
  if (p.dtype == DType::kF16) {
    masked ? run_kernel<__half, true>(p, ctas) : run_kernel<__half, false>(p, ctas);
  } else {
    masked ? run_kernel<__nv_bfloat16, true>(p, ctas) : run_kernel<__nv_bfloat16, false>(p, ctas);
  }
}

}  // namespace
}  // namespace mla::test

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 60;
  const int seed = argc > 2 ? std::atoi(argv[2]) : 1;
  mla::test::PrefillCases{"the Hopper prefill kernel, emulated", mla::test::run}.run_all(cases, seed);
  return mla::test::report.clean() ? 0 : 1;
}
