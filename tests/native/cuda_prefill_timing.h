// Device time of prefill from replays of a CUDA graph. The card is limited by power, so there are two numbers: burst,
// after a quarter of a second without work, and sustained, after 150 ms of the same work.
#pragma once

#include <unistd.h>

#include "tests/native/cuda_prefill_group.h"

namespace mla::test {

struct PrefillCell {
  int32_t batch, queries, keys, heads;  // of each request
  bool causal;
  bool in_parts = false;  // keys in place in the up-projection, beside rope keys
};

constexpr PrefillCell kPrefillCells[] = {
    {1, 8192, 8192, 24, true},   {1, 8192, 8192, 128, true},  {4, 2048, 2048, 24, true},
    {1, 32768, 32768, 24, true}, {1, 2048, 65536, 24, false}, {1, 2048, 65536, 24, true},
    {1, 8192, 8192, 24, false},  {64, 128, 128, 24, true},    {1, 2048, 65536, 24, false, /*in_parts=*/true},
};

struct Times {
  double burst, sustained;  // microseconds, medians
};

template <class Record>
Times time_under_power(int calls, Record record) {
  constexpr int kMeasured = 9;
  cudaStream_t stream = stream_of(device());
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) record();
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&stop));
  const auto measure = [&](int warm_ups) {
    std::vector<float> times;
    for (int i = 0; i < warm_ups; ++i) check(cudaGraphLaunch(executable, stream));
    for (int i = 0; i < kMeasured; ++i) {
      check(cudaEventRecord(start, stream));
      check(cudaGraphLaunch(executable, stream));
      check(cudaEventRecord(stop, stream));
      check(cudaEventSynchronize(stop));
      float milliseconds = 0;
      check(cudaEventElapsedTime(&milliseconds, start, stop));
      times.push_back(milliseconds * 1000.0f / static_cast<float>(calls));
    }
    std::sort(times.begin(), times.end());
    return double{times[times.size() / 2]};
  };
  synchronize();
  usleep(250000);
  Times times{measure(2), 0};
  times.sustained = measure(static_cast<int>(150000 / (times.burst * calls)) + 1);
  check(cudaEventDestroy(start));
  check(cudaEventDestroy(stop));
  check(cudaGraphExecDestroy(executable));
  check(cudaGraphDestroy(graph));
  return times;
}

// fp16 only by name: its times are bf16's.
inline bool timed(const PrefillVariant& variant, const std::string& only) {
  return selected(variant, only) && (variant.dtype != DType::kF16 || only.find(',') != std::string::npos);
}

// The results of cells with few enough rows are compared with the oracle too. `cells`: as is_listed knows them.
inline void time_prefill(const PrefillVariant& variant, const std::string& cells) {
  for (int number = 0; number < static_cast<int>(std::size(kPrefillCells)); ++number) {
    if (!is_listed(number, cells)) continue;
    const PrefillCell& cell = kPrefillCells[number];
    if (cell.in_parts && variant.fp8()) continue;
    PrefillShapes shapes;
    shapes.variant = variant;
    shapes.heads = cell.heads;
    shapes.causal = cell.causal;
    shapes.whole_values = true;
    if (cell.in_parts) {
      shapes.nope_width = 2 * kNope;
      shapes.rope_width = kRope;
    }
    shapes.q_lens.assign(cell.batch, cell.queries);
    shapes.kv_lens.assign(cell.batch, cell.keys);
    PrefillCase problem(shapes);
    problem.run();
    const double error = cell.batch * cell.queries <= 8192 && cell.heads <= 24 ? problem.verify() : NAN;
    const double pairs = double{1} * cell.queries * (cell.causal ? cell.keys - 0.5 * cell.queries : cell.keys);
    const double flops = 2.0 * (kHeadDim + kNope) * cell.batch * cell.heads * pairs;
    const Times times = time_under_power(flops < 1e12 ? 4 : 1, [&] { check(prefill(problem.params(), device())); });
    std::printf(
        "%-8s %-11s %2d x %5d queries, %5d keys x %3d heads, %s%s: burst %8.1f us %6.1f TFLOP/s, sustained %8.1f us "
        "%6.1f TFLOP/s, error %.1e\n",
        variant.name.c_str(), variant.dtypes().c_str(), cell.batch, cell.queries, cell.keys, cell.heads,
        cell.causal ? "causal" : "full  ", cell.in_parts ? ", keys in parts" : "", times.burst,
        flops / times.burst * 1e-6, times.sustained, flops / times.sustained * 1e-6, error);
    std::fflush(stdout);
  }
}

}  // namespace mla::test
