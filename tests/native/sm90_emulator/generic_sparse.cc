// The generic sparse kernel on a machine without a GPU: its source, compiled for the host over an emulated CTA
// (machine.h), against float64. What this cannot show: the meaning of the real instructions, time, and registers.
//   mla_generic_sparse_emulator [cases] [seed]
#define MLA_EMULATED generic_sparse
#include "tests/native/sm90_emulator/fp8_halves.h"
// The kernel's headers come first, so that they find the emulator's vocabulary.
#include "kernels/sparse/generic/kernel.cuh"
#include "tests/native/sm90_emulator/sparse_cases.h"

namespace mla::generic_sparse {
alignas(1024) unsigned char shared_base[emulator::kSharedBytes];
}

namespace mla::test {
namespace {

using emulator::machine;

template <class Cached, int kRows, int kTokens>
void run_shape(const SparseDecodeParams& p, Random& random) {
  using Shape = ShapeOf<Cached, kRows, kTokens>;
  int most = kMaxStages;
  while (shared_bytes<Cached, Shape>(most) > emulator::kSharedBytes) --most;
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

}  // namespace
}  // namespace mla::test

int main(int argc, char** argv) {
  const auto kernel = [](const mla::SparseDecodeParams& p, mla::test::Random& random) { mla::test::run(p, random); };
  return mla::test::run_all("the generic sparse kernel, emulated", argc > 1 ? std::atoi(argv[1]) : 40,
                            argc > 2 ? std::atoi(argv[2]) : 1, {16, 32, 64}, kernel);
}
