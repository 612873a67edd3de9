// The Hopper decode kernel on a machine without a GPU: its source, compiled for the host over an emulated CTA
// (machine.h), against float64. What this cannot show: the meaning of the real instructions, time, and registers.
//   mla_sm90_emulator [cases] [seed]
#include <algorithm>
#include <cmath>

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
  s.tile_rows = ceil_div(std::min(s.heads * s.max_q_len, 64), 8) * 8;
  if (s.tile_rows == 56) s.tile_rows = 64;
  // Several narrow tiles: the wrapper does not choose them, and a plan may have them.
  if (s.heads * s.max_q_len > 64 && pick(random, 0, 3) == 0) s.tile_rows = choose(random, {24, 40, 48});
  s.page_size = choose(random, {16, 32, 64, 64, 128, 192});
  draw_batch(s, random);
  return s;
}

// Two tokens of a request, in different blocks, have all of a row's weight, the later one more of it; it alone has
// values that are not 0, and they are 1. So a partial result, in fp32, is the larger weight over the sum of both:
// exactly that, where the larger weight is 1, and off by what a format of 8 bits loses, where it is not.
void expect_exact_largest_weight(DType dtype, int tile_rows, int tiles) {
  constexpr int kEarly = 10, kLate = 100;
  DecodeShape s;
  s.q_type = s.cache_type = dtype;
  s.tile_rows = tile_rows;
  s.heads = tile_rows * tiles;
  s.pair = true;
  s.parts = 2 * tiles;  // two pieces of each tile, and so partial results; the first has both tokens
  s.kv_lens = {512};
  Random random(static_cast<uint32_t>(s.heads));
  DecodeCase problem(s, random);
  for (int64_t i = 0; i < problem.q.count(); ++i) problem.q.set(i, 0);
  for (int64_t i = 0; i < problem.rope.count(); ++i) {
    problem.rope.set(i, i % kRope == 0 ? 0.25f + 0.0625f * static_cast<float>(i / kRope) : 0);
  }
  for (int token = 0; token < s.kv_lens[0]; ++token) {
    const int64_t first = problem.slot_of(0, token) * kWidth;
    for (int c = 0; c < kWidth; ++c) problem.cache.set(first + c, token == kLate && c < kLatent ? 1 : 0);
    problem.cache.set(first + kLatent, token == kEarly ? 1.0f : token == kLate ? 1.75f : -30000);
  }
  const Device device = device_with(1);
  report.expect(problem.make_plan(device).empty(), "the plan of two weights");
  const DecodeParams p = problem.params();
  attend(p, random);
  double worst = 0;
  int checked = 0;
  for (const WorkItem& item : problem.items) {
    if (item.partial < 0 || item.kv_begin != 0 || item.kv_end <= kLate) continue;
    ++checked;
    for (int row = 0; row < tile_rows; ++row) {
      const double score = problem.rope.at((int64_t{item.row_tile} * tile_rows + row) * kRope) * problem.scale;
      const double expected = 1 / (1 + std::exp(-0.75 * score));
      for (int c = 0; c < kLatent; ++c) {
        const double out = problem.partial_out[(int64_t{item.partial} * tile_rows + row) * kLatent + c];
        worst = std::max(worst, std::abs(out - expected) / expected);
      }
    }
  }
  report.expect(checked == tiles, "a request in two pieces of each tile");
  report.expect(worst < 1e-5, std::to_string(tiles) + " tiles of " + std::to_string(tile_rows) +
                                  " rows: the largest weight is off by " + std::to_string(worst));
}

}  // namespace
}  // namespace mla::test

int main(int argc, char** argv) {
  using namespace mla;
  for (int rows : {8, 24, 40, 64}) {
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      for (int tiles : {1, 2}) test::expect_exact_largest_weight(dtype, rows, tiles);
    }
  }
  const test::DecodeCases cases{"the Hopper kernel, emulated", test::random_case, test::attend,
                                [](const test::DecodeShape&) { return false; }};
  return cases.main(argc, argv);
}
