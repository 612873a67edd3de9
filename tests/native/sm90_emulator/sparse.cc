// The Hopper sparse kernels on a machine without a GPU: their sources, compiled for the host over an emulated CTA
// (machine.h), against float64. What this cannot show: the meaning of the real instructions, time, and registers.
//   mla_sm90_sparse_emulator [cases] [seed] [heads a tile]
#define MLA_EMULATED sparse_sm90
#include "kernels/sparse/sm90/fp8/kernel.cuh"
#include "kernels/sparse/sm90/kernel.cuh"
// The kernels' headers come first, so that they find the emulator's vocabulary.
#include "kernels/sparse/sm90/limits.h"
#include "tests/native/sm90_emulator/describe.h"
#include "tests/native/sm90_emulator/sparse_cases.h"

namespace mla::sparse_sm90 {
alignas(1024) unsigned char shared_base[emulator::kSharedBytes];
}

namespace mla::test {
namespace {

using emulator::machine;

// As kernels/sparse/sm90/sparse.cu does.
sparse_sm90::QueryMaps describe(const SparseDecodeParams& p) {
  sparse_sm90::QueryMaps maps{};
  const int64_t rows = int64_t{p.tokens} * p.heads;
  emulator::describe(&maps.q_latent, p.q_latent,
                     {{64, 0, 64}, {rows, p.q_latent_stride * 2, p.tile_rows}, {8, 128, 8}});
  emulator::describe(&maps.q_rope, p.q_rope, {{64, 0, 64}, {rows, p.q_rope_stride * 2, p.tile_rows}, {1, 128, 1}});
  return maps;
}

// `kernel` on a few CTAs, which share the work.
template <class Kernel>
void run_ctas(const SparseDecodeParams& p, int threads, Random& random, Kernel kernel) {
  const int items = p.tokens * ceil_div(p.heads, p.tile_rows) * p.splits;
  machine.blocks = static_cast<uint32_t>(pick(random, 1, std::min(items, 4)));
  for (uint32_t cta = 0; cta < machine.blocks; ++cta) {
    if (machine.run(cta, threads, kernel)) continue;
    std::fprintf(stderr, "the emulated kernel hangs in CTA %u\n", cta);
    std::abort();
  }
}

template <class Element, int kTileRows>
bool run_rows(const SparseDecodeParams& p, Random& random) {
  if (p.tile_rows != kTileRows) return false;
  const sparse_sm90::QueryMaps maps = describe(p);
  run_ctas(p, sparse_sm90::Layout<kTileRows>::kThreads, random,
           [&] { sparse_sm90::sparse_kernel<Element, kTileRows>(p, maps); });
  return true;
}

template <class Element>
void run_elements(const SparseDecodeParams& p, Random& random) {
  const bool known = run_rows<Element, 8>(p, random) || run_rows<Element, 16>(p, random) ||
                     run_rows<Element, 24>(p, random) || run_rows<Element, 32>(p, random) ||
                     run_rows<Element, 40>(p, random) || run_rows<Element, 48>(p, random) ||
                     run_rows<Element, 64>(p, random);
  report.expect(known, "no instance for these tiles");
}

template <class Layout, int kTileRows>
bool run_fp8_rows(const SparseDecodeParams& p, Random& random) {
  namespace fp8 = sparse_sm90::fp8;
  if (p.tile_rows != kTileRows) return false;
  if constexpr (fp8::is_wide<kTileRows>) {
    using Shape = fp8::WideShape<Layout>;
    run_ctas(p, Shape::kThreads, random, [&] { sparse_sm90::wide_fp8_sparse_kernel<Shape>(p); });
  } else {
    using Shape = fp8::Shape<Layout, kTileRows>;
    run_ctas(p, Shape::kThreads, random, [&] { sparse_sm90::fp8_sparse_kernel<Shape>(p); });
  }
  return true;
}

template <class Layout>
void run_layout(const SparseDecodeParams& p, Random& random) {
  const bool known = run_fp8_rows<Layout, 8>(p, random) || run_fp8_rows<Layout, 16>(p, random) ||
                     run_fp8_rows<Layout, 24>(p, random) || run_fp8_rows<Layout, 32>(p, random) ||
                     run_fp8_rows<Layout, 40>(p, random) || run_fp8_rows<Layout, 48>(p, random) ||
                     run_fp8_rows<Layout, 64>(p, random);
  report.expect(known, "no instance for these tiles");
}

void run(SparseDecodeParams p, Random& random) {
  if (p.ds_mla && p.tile_rows == 48) p.tile_rows = 64;
  report.expect(sparse_sm90::takes(p), "the kernels do not take the call");
  if (p.ds_mla) return run_layout<sparse_sm90::fp8::DsMla>(p, random);
  if (p.cache_dtype == DType::kE4M3FN) return run_layout<sparse_sm90::fp8::PerTensor>(p, random);
  p.cache_dtype == DType::kF16 ? run_elements<__half>(p, random) : run_elements<__nv_bfloat16>(p, random);
}

}  // namespace
}  // namespace mla::test

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 40, seed = argc > 2 ? std::atoi(argv[2]) : 1;
  std::vector<int> tile_rows = {8, 16, 24, 32, 40, 48, 64};
  if (argc > 3) tile_rows = {std::atoi(argv[3])};
  return mla::test::run_all("the Hopper sparse kernels, emulated", cases, seed, tile_rows, mla::test::run);
}
