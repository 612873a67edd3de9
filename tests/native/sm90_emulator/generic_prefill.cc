// The generic prefill kernel on a machine without a GPU: its source, compiled for the host over an emulated CTA
// (machine.h), against float64. What this cannot show: the meaning of the real instructions, time, and registers.
//   mla_generic_prefill_emulator [cases] [seed]
#define MLA_EMULATED generic_prefill
#include "kernels/prefill/generic/kernel.cuh"
// The kernel's headers come first, so that they find the emulator's vocabulary.
#include "kernels/prefill/generic/limits.h"
#include "tests/native/prefill_cases.h"

namespace mla::generic_prefill {
alignas(1024) unsigned char shared_base[emulator::kSharedBytes];
}

namespace mla::test {
namespace {

using emulator::machine;

void run(const PrefillParams& p, Random&) {
  report.expect(generic_prefill::takes(p), "the kernel refuses this");
  const int64_t ctas = most_head_tiles<generic_prefill::kTileQueries>(p) * p.heads;
  for (int64_t cta = 0; cta < ctas; ++cta) {
    const bool ended = machine.run(static_cast<uint32_t>(cta), generic_prefill::kThreads, [&] {
      p.dtype == DType::kF16 ? generic_prefill::prefill_kernel<__half>(p)
                             : generic_prefill::prefill_kernel<__nv_bfloat16>(p);
    });
    if (ended) continue;
    std::fprintf(stderr, "the emulated kernel hangs in CTA %d\n", static_cast<int>(cta));
    std::abort();
  }
}

}  // namespace
}  // namespace mla::test

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 40;
  const int seed = argc > 2 ? std::atoi(argv[2]) : 1;
  mla::emulator::machine.random.seed(static_cast<uint32_t>(seed));
  mla::test::PrefillCases all{"the generic prefill kernel, emulated", mla::test::run, /*any_scale=*/true};
  all.key_parts = true;
  all.run_all(cases, seed);
  return mla::test::report.clean() ? 0 : 1;
}
