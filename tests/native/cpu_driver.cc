// Tests the CPU kernels without XLA and Python, against float64. Exits with 1 on any disagreement.
//   cpu_driver            all groups, under a minute
//   cpu_driver --quick    fewer cases, for sanitizers
//   cpu_driver --time     milliseconds and rates of decode, sparse decode and prefill, for each variant
#include <chrono>
#include <cstdio>

#include "tests/native/decode_groups.h"
#include "tests/native/helper_groups.h"
#include "tests/native/prefill_groups.h"
#include "tests/native/sparse_groups.h"

namespace mla::test {
namespace {

void time_decode() {
  struct Cell {
    int batch, tokens, heads, tile_rows;
  };
  constexpr int kThreads = 2, kRepeats = 15;
  const Device device = device_with(kThreads);
  Random random(12);
  for (const Cell& cell : {Cell{4, 4096, 24, 32}, Cell{1, 32768, 24, 32}, Cell{4, 4096, 128, 128}}) {
    for (const TypePair& types : {kTypePairs[0], kTypePairs[1], kTypePairs[2], kTypePairs[3]}) {
      DecodeShape s;
      s.q_type = types.q;
      s.cache_type = types.cache;
      s.heads = cell.heads;
      s.tile_rows = cell.tile_rows;
      s.parts = kThreads * parts_per_unit();
      s.kv_lens.assign(cell.batch, cell.tokens);
      DecodeCase problem(s, random);
      problem.make_plan(device);
      for (int variant : variants_here()) {
        problem.shape.variant = variant;
        double best = 1e9;
        for (int i = 0; i < kRepeats; ++i) {
          const auto start = std::chrono::steady_clock::now();
          decode(problem.params(), device);
          const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
          best = std::min(best, seconds.count());
        }
        const double bytes = 1.0 * cell.batch * cell.tokens * kWidth * size_of(types.cache);
        const double flops = 2.0 * cell.batch * cell.tokens * cell.heads * (kWidth + kLatent);
        std::printf("b %d x %5d tokens x %3d heads  %4s/%-6s  %-12s %8.2f ms %6.2f GB/s %7.1f GFLOP/s\n", cell.batch,
                    cell.tokens, cell.heads, name_of(types.q), name_of(types.cache), variants()[variant - 1],
                    best * 1e3, bytes / best / 1e9, flops / best / 1e9);
      }
    }
  }
}

void time_sparse() {
  struct Cell {
    int tokens, topk, heads, splits;
  };
  constexpr int kThreads = 2, kRepeats = 5;
  const Device device = device_with(kThreads);
  Random random(14);
  for (const Cell& cell : {Cell{32, 2048, 24, 2}, Cell{1, 2048, 128, 8}, Cell{256, 512, 128, 1}}) {
    for (const SparseTypes& types : {sparse_types()[0], sparse_types()[9]}) {
      SparseShape s;
      s.q_type = types.q;
      s.cache_type = types.cache;
      s.ds_mla = types.ds_mla;
      s.tokens = cell.tokens;
      s.heads = cell.heads;
      s.topk = cell.topk;
      s.splits = cell.splits;
      s.tile_rows = cell.heads <= 32 ? 32 : 128;
      s.slots = 16384;
      s.masks = false;
      SparseCase problem(s, random);
      for (int variant : variants_here()) {
        problem.shape.variant = variant;
        double best = 1e9;
        for (int i = 0; i < kRepeats; ++i) {
          const auto start = std::chrono::steady_clock::now();
          sparse_decode(problem.params(), device);
          const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
          best = std::min(best, seconds.count());
        }
        const double chosen = 1.0 * cell.tokens * cell.topk;
        const double bytes = chosen * (types.ds_mla ? kDsMlaBytes : kWidth * size_of(types.cache));
        const double flops = 2.0 * chosen * cell.heads * (kWidth + kLatent);
        std::printf("%3d queries x %4d chosen x %3d heads  %-6s  %-12s %8.2f ms %6.2f GB/s %7.1f GFLOP/s\n",
                    cell.tokens, cell.topk, cell.heads, types.ds_mla ? "ds_mla" : name_of(types.cache),
                    variants()[variant - 1], best * 1e3, bytes / best / 1e9, flops / best / 1e9);
      }
    }
  }
}

void time_prefill() {
  struct Cell {
    int queries, keys, heads;
    bool causal;
  };
  constexpr int kThreads = 2, kRepeats = 3;
  const Device device = device_with(kThreads);
  Random random(13);
  for (const Cell& cell : {Cell{512, 16384, 24, false}, Cell{1024, 1024, 24, true}, Cell{64, 4096, 24, true}}) {
    for (DType type : kPrefillTypes) {
      PrefillShape s;
      s.type = type;
      s.heads = cell.heads;
      s.causal = cell.causal;
      s.q_lens = std::vector<int>{cell.queries};
      s.kv_lens = std::vector<int>{cell.keys};
      PrefillCase problem(s, random);
      for (int variant : prefill_variants_here()) {
        problem.shape.variant = variant;
        double best = 1e9;
        for (int i = 0; i < kRepeats; ++i) {
          const auto start = std::chrono::steady_clock::now();
          prefill(problem.params(), device);
          const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
          best = std::min(best, seconds.count());
        }
        const double hidden = cell.causal ? cell.queries / 2.0 : 0;
        const double flops = 2.0 * cell.queries * (cell.keys - hidden) * cell.heads * (kHeadDim + kNope);
        std::printf("%4d queries x %5d keys x %3d heads %-6s %-4s  %-12s %8.2f ms %7.1f GFLOP/s\n", cell.queries,
                    cell.keys, cell.heads, cell.causal ? "causal" : "", name_of(type), variants()[variant - 1],
                    best * 1e3, flops / best / 1e9);
      }
    }
  }
}

int run_all() {
  const Device device = device_with(3);
  test_casts(device);
  test_update_cache();
  test_merge_states();
  test_pack_kv();
  test_gather_context();
  test_plan();
  test_plan_rule(device);
  test_variants(device);
  test_decode_sweep(device);
  test_decode_ds_mla(device);
  test_decode_heads(device);
  test_bad_values(device);
  test_hidden_nan(device);
  test_determinism();
  test_batch_invariance(device);
  test_sparse_sweep(device);
  test_sparse_layers(device);
  test_sparse_nan(device);
  test_sparse_determinism();
  test_prefill_sweep(device);
  test_prefill_determinism();
  test_prefill_hidden_nan(device);
  test_prefill_bad_offsets();
  std::printf("%s\n", report.clean() ? "all passed" : "FAILED");
  return report.clean() ? 0 : 1;
}

}  // namespace
}  // namespace mla::test

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "--time") {
    mla::test::time_decode();
    mla::test::time_sparse();
    mla::test::time_prefill();
    return 0;
  }
  if (!mode.empty() && mode != "--quick") {
    std::fprintf(stderr, "usage: %s [--quick | --time]\n", argv[0]);
    return 2;
  }
  mla::test::quick = mode == "--quick";
  return mla::test::run_all();
}
