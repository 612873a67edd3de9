// Device time of decode from replays of a CUDA graph, and its results compared with the oracle.
#pragma once

#include "tests/native/cuda_decode_case.h"

namespace mla::test {

constexpr int kReplays = 15;

// Median microseconds of one call, of `calls` of them captured by `record`.
template <class Record>
double time_calls(int calls, Record record) {
  cudaStream_t stream = stream_of(device());
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) record(i);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&stop));
  std::vector<float> times;
  for (int i = 0; i < kReplays + 3; ++i) {
    check(cudaEventRecord(start, stream));
    check(cudaGraphLaunch(executable, stream));
    check(cudaEventRecord(stop, stream));
    check(cudaEventSynchronize(stop));
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start, stop));
    if (i >= 3) times.push_back(milliseconds * 1000.0f / static_cast<float>(calls));
  }
  check(cudaEventDestroy(start));
  check(cudaEventDestroy(stop));
  check(cudaGraphExecDestroy(executable));
  check(cudaGraphDestroy(graph));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// Terabytes a second, by plain copies: a graph's are slower.
inline double time_copy() {
  constexpr size_t kBytes = size_t{1} << 30;
  constexpr int kCopies = 10;
  const Array<uint8_t> source(kBytes), target(kBytes);
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&stop));
  for (int i = 0; i < 3 + kCopies; ++i) {
    if (i == 3) check(cudaEventRecord(start, stream_of(device())));
    check(cudaMemcpyAsync(target.data(), source.data(), kBytes, cudaMemcpyDeviceToDevice, stream_of(device())));
  }
  check(cudaEventRecord(stop, stream_of(device())));
  check(cudaEventSynchronize(stop));
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, start, stop));
  check(cudaEventDestroy(start));
  check(cudaEventDestroy(stop));
  return 2.0 * kBytes * kCopies / milliseconds * 1e-9;
}

// What is timed: a decode step over `tokens` cached tokens a sequence, or over lengths that differ.
struct Cell {
  enum Lengths { kEven, kNormal, kOneLong };
  int32_t batch, tokens, heads, queries;
  Lengths lengths = kEven;
};

constexpr Cell kCells[] = {
    {128, 4096, 128, 1},
    {128, 4096, 96, 1},
    {128, 4096, 24, 1},
    {128, 4096, 24, 4},
    {128, 4096, 32, 2},
    {128, 4096, 16, 1},
    {128, 1024, 24, 1},
    {16, 100000, 24, 1},
    {1, 131072, 24, 1},
    {4, 65536, 24, 2},
    {8, 4096, 24, 1},
    {1, 8192, 24, 1},
    {1, 512, 24, 1},
    {128, 4096, 24, 1, Cell::kNormal},     // mean 4096, deviation 1024
    {128, 4096, 128, 1, Cell::kNormal},    // likewise
    {128, 100000, 24, 1, Cell::kOneLong},  // beside 127 of 1000
    {128, 1773, 24, 1},                    // the same tokens, evenly
};

inline std::vector<int32_t> lengths_of(const Cell& cell) {
  std::vector<int32_t> lengths(cell.batch, cell.tokens);
  Random random(17);
  std::normal_distribution<double> normal(cell.tokens, cell.tokens / 4.0);
  for (int32_t b = 0; b < cell.batch; ++b) {
    if (cell.lengths == Cell::kNormal) lengths[b] = std::max(1, static_cast<int32_t>(normal(random)));
    if (cell.lengths == Cell::kOneLong && b != cell.batch / 2) lengths[b] = 1000;
  }
  return lengths;
}

// What may be timed instead of what the wrapper would choose.
struct Forced {
  int32_t tile_rows = 0;
  int32_t page_size = 64;
};

// By the variants of `selection`, all over the same dtypes. The cache is copied often enough that no call
// finds its keys in the L2.
inline void time_cell(int number, const std::vector<const Variant*>& selection, const Forced& forced) {
  constexpr double kColdBytes = 200e6;
  const Cell& cell = kCells[number];
  DecodeShapes shapes;
  shapes.variant = selection.front();
  shapes.heads = cell.heads;
  shapes.max_q_len = cell.queries;
  shapes.tile_rows = forced.tile_rows;
  shapes.page_size = forced.page_size;
  shapes.kv_lens = lengths_of(cell);
  const double tokens = std::accumulate(shapes.kv_lens.begin(), shapes.kv_lens.end(), 0.0);
  const double rows = double{1} * cell.queries * cell.heads;
  const double cache_bytes = tokens * kWidth * size_of(shapes.variant->cache_dtype);
  const double other_bytes =
      cell.batch * rows * (kWidth * size_of(shapes.variant->q_dtype) + kLatent * size_of(shapes.variant->out_dtype()));
  const double flops = 2.0 * tokens * rows * (kWidth + kLatent);
  const int copies = cache_bytes >= kColdBytes ? 1 : static_cast<int>(kColdBytes / cache_bytes) + 1;
  const int calls = std::max(copies, 5);
  std::vector<DecodeCase> cases;
  for (int i = 0; i < copies; ++i) {
    shapes.seed = 100 + i;
    cases.emplace_back(shapes);
  }
  constexpr const char* kLengths[] = {"", " normal", " longest"};
  for (const Variant* variant : selection) {
    for (DecodeCase& each : cases) {
      each.use(*variant, forced.tile_rows);
      each.run();
    }
    const Errors errors = cases[0].verify();
    synchronize();
    const double us = time_calls(calls, [&](int i) { check(decode(cases[i % copies].params(), device())); });
    const double plan_us = time_calls(10, [&](int) { cases[0].make_plan(); });
    const double both_us = time_calls(calls, [&](int i) {
      cases[i % copies].make_plan();
      check(decode(cases[i % copies].params(), device()));
    });
    std::printf(
        "%2d: %3d x %6d%s x %3d heads x %d  %-8s %-12s %2d rows %8.1f us %5.2f TB/s %6.1f TFLOP/s, with plan "
        "%8.1f us, plan %5.1f us, error %.1e, lse %.1e\n",
        number, cell.batch, cell.tokens, kLengths[cell.lengths], cell.heads, cell.queries, variant->name.c_str(),
        variant->dtypes().c_str(), cases[0].params().plan.tile_rows, us, (cache_bytes + other_bytes) / us * 1e-6,
        flops / us * 1e-6, both_us, plan_us, errors.out, errors.lse);
    std::fflush(stdout);
  }
}

// `cells`: numbers with commas between them; empty: all. Without a selection, f16 is left out: its times are bf16's.
inline void time_all(const std::string& only, const std::string& cells, const Forced& forced) {
  std::printf("copy of 1 GiB: %.2f TB/s, read and written\n", time_copy());
  std::vector<std::vector<const Variant*>> selections;  // by dtypes
  for (const Variant& variant : decode_variants()) {
    if (!selected(variant, only) || (only.empty() && variant.q_dtype == DType::kF16)) continue;
    const auto same = std::find_if(selections.begin(), selections.end(), [&](const auto& selection) {
      return selection.front()->dtypes() == variant.dtypes();
    });
    if (same == selections.end())
      selections.push_back({&variant});
    else
      same->push_back(&variant);
  }
  require(!selections.empty(), "this device has no variant " + only + " of mla_decode");
  for (int number = 0; number < static_cast<int>(std::size(kCells)); ++number) {
    if (!is_listed(number, cells)) continue;
    for (const auto& selection : selections) time_cell(number, selection, forced);
  }
}

}  // namespace mla::test
