// The generic decode kernel on a machine without a GPU: its source, compiled for the host over an emulated CTA
// (machine.h), against float64. What this cannot show: the meaning of the real instructions, time, and registers.
//   mla_generic_decode_emulator [cases] [seed]
#define MLA_EMULATED generic_decode
#include "tests/native/sm90_emulator/fp8_halves.h"

namespace mla {
extern unsigned char shared_base[];  // the kernel declares it in this namespace
}
#include "kernels/decode/generic/kernel.cuh"
// The kernel's headers come first, so that they find the emulator's vocabulary.
#include "tests/native/sm90_emulator/decode_cases.h"

namespace mla {
alignas(1024) unsigned char shared_base[emulator::kSharedBytes];
namespace generic_decode {
extern unsigned char shared_base[] __attribute__((alias("_ZN3mla11shared_baseE")));
}
}  // namespace mla

namespace mla::test {
namespace {

using emulator::machine;

template <class Cached, int kRows, int kTokens>
void run_shape(const DecodeParams& p, Random& random) {
  using Shape = ShapeOf<Cached, kRows, kTokens>;
  int most = kMaxStages;
  while (shared_bytes<Cached, Shape>(most) > emulator::kSharedBytes) --most;
  const int stages = pick(random, 2, most);
  for (int32_t part = 0; part < p.plan.parts; ++part) {
    const bool ended =
        machine.run(static_cast<uint32_t>(part), Shape::kThreads, [&] { decode_kernel<Cached, Shape>(p, stages); });
    if (ended) continue;
    std::fprintf(stderr, "the emulated kernel hangs in part %d\n", part);
    std::abort();
  }
}

template <class Cached>
void run_rows(const DecodeParams& p, Random& random) {
  switch (p.plan.tile_rows) {
    case 16: return run_shape<Cached, 16, 64>(p, random);
    case 32:
      return pick(random, 0, 1) == 0 ? run_shape<Cached, 32, 64>(p, random) : run_shape<Cached, 32, 32>(p, random);
    default: return run_shape<Cached, 64, 32>(p, random);
  }
}

void attend(const DecodeParams& p, Random& random) {
  if (p.ds_mla) return run_rows<DsMla>(p, random);
  switch (p.cache_dtype) {
    case DType::kBF16: return run_rows<__nv_bfloat16>(p, random);
    case DType::kF16: return run_rows<__half>(p, random);
    default: return run_rows<E4M3FN>(p, random);
  }
}

DecodeShape random_case(Random& random) {
  DecodeShape s;
  s.ds_mla = pick(random, 0, 1) == 0;
  s.cache_type = s.ds_mla ? DType::kE4M3FN : choose(random, {DType::kBF16, DType::kF16, DType::kE4M3FN});
  s.q_type = s.ds_mla ? DType::kBF16 : s.cache_type;
  if (s.cache_type == DType::kE4M3FN && !s.ds_mla) {
    s.q_type = choose(random, {DType::kBF16, DType::kF16, DType::kE4M3FN});
    s.scales = pick(random, 0, 1) == 1;
  }
  s.heads = pick(random, 1, 70);
  s.max_q_len = s.heads > 32 ? 1 : pick(random, 1, 3);
  s.tile_rows = choose(random, {16, 32, 64});
  s.page_size = choose(random, {1, 4, 16, 64, 96});
  draw_batch(s, random);
  return s;
}

}  // namespace
}  // namespace mla::test

int main(int argc, char** argv) {
  using namespace mla;
  const test::DecodeCases cases{"the generic decode kernel, emulated", test::random_case, test::attend,
                                [](const test::DecodeShape& shape) { return shape.ds_mla; }};
  return cases.main(argc, argv);
}
