// The Hopper decode kernel on a machine without a GPU: its source, compiled for the host over an emulated CTA
// (machine.h), against float64. What this cannot show: the meaning of the real instructions, time, and registers.
//   mla_sm90_emulator [cases] [seed]
#include "kernels/decode/sm90/kernel.cuh"
#include "kernels/decode/sm90/wide/kernel.cuh"
// The kernel's headers come first, so that they find the emulator's vocabulary.
#include "kernels/decode/sm90/limits.h"
#include "tests/native/sm90_emulator/decode_cases.h"
#include "tests/native/sm90_emulator/describe.h"

namespace mla::sm90 {
alignas(1024) unsigned char shared_base[emulator::kSharedBytes];
}

namespace mla::test {
namespace {

using emulator::describe;
using emulator::machine;

// As kernels/decode/sm90/decode.cu does.
sm90::TensorMaps describe(const DecodeParams& p) {
  sm90::TensorMaps maps{};
  const bool whole = p.page_size >= kBlockTokens, wide = p.plan.tile_rows == sm90::wide::kRows;
  const int64_t token = kWidth * 2, page = p.page_size * token, rows = int64_t{p.tokens} * p.heads;
  describe(&maps.keys, p.cache,
           {{64, 0, 64},
            {p.page_size, token, whole ? kBlockTokens : p.page_size},
            {9, 128, wide || !whole ? 1 : sm90::kSlotChunks},
            {p.pages, page, 1},
            {p.layers, p.pages * page, 1}});
  describe(&maps.q_latent, p.q_latent, {{64, 0, 64}, {rows, p.q_latent_stride * 2, p.plan.tile_rows}, {8, 128, 8}});
  describe(&maps.q_rope, p.q_rope, {{64, 0, 64}, {rows, p.q_rope_stride * 2, p.plan.tile_rows}, {1, 128, 1}});
  return maps;
}

template <class Element, int kTileRows>
bool run_tiles(const DecodeParams& p) {
  if (p.plan.tile_rows != kTileRows) return false;
  const sm90::TensorMaps maps = describe(p);
  for (int32_t part = 0; part < p.plan.parts; ++part) {
    bool ended = false;
    if constexpr (kTileRows == sm90::wide::kRows) {
      ended = machine.run(static_cast<uint32_t>(part), sm90::wide::kThreads,
                          [&] { sm90::wide_decode_kernel<Element>(p, maps); });
    } else {
      ended = machine.run(static_cast<uint32_t>(part), sm90::Shape<kTileRows>::kThreads,
                          [&] { sm90::decode_kernel<Element, sm90::Shape<kTileRows>>(p, maps); });
    }
    if (!ended) {
      std::fprintf(stderr, "the emulated kernel hangs in part %d\n", part);
      std::abort();
    }
  }
  return true;
}

template <class Element>
bool run_kernel(const DecodeParams& p) {
  return run_tiles<Element, 8>(p) || run_tiles<Element, 16>(p) || run_tiles<Element, 24>(p) ||
         run_tiles<Element, 32>(p) || run_tiles<Element, 40>(p) || run_tiles<Element, 48>(p) ||
         run_tiles<Element, 64>(p);
}

void attend(const DecodeParams& p, Random&) {
  const bool known = p.q_dtype == DType::kF16 ? run_kernel<__half>(p) : run_kernel<__nv_bfloat16>(p);
  report.expect(known, "no instance for these tiles");
}

DecodeShape random_case(Random& random) {
  DecodeShape s;
  s.q_type = s.cache_type = choose(random, {DType::kBF16, DType::kF16});
  s.heads = pick(random, 0, 2) > 0 ? pick(random, 1, 64) : pick(random, 65, 128);
  s.max_q_len = s.heads > 64 ? 1 : pick(random, 1, 4);
  const int tiles = ceil_div(s.heads * s.max_q_len, 64);
  s.tile_rows = ceil_div(ceil_div(s.heads * s.max_q_len, tiles), 8) * 8;
  if (s.tile_rows == 56) s.tile_rows = 64;
  s.page_size = choose(random, {16, 32, 64, 64, 128, 192});
  draw_batch(s, random);
  return s;
}

}  // namespace
}  // namespace mla::test

int main(int argc, char** argv) {
  using namespace mla;
  const test::DecodeCases cases{"the Hopper kernel, emulated", test::random_case, test::attend,
                                [](const test::DecodeShape&) { return false; }};
  return cases.main(argc, argv);
}
