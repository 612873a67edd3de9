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

inline double time_copy() {
  constexpr size_t kBytes = size_t{1} << 30;
  Array<uint8_t> source(kBytes), target(kBytes);
  const double us = time_calls(3, [&](int) {
    check(cudaMemcpyAsync(target.data(), source.data(), kBytes, cudaMemcpyDeviceToDevice, stream_of(device())));
  });
  return 2.0 * kBytes / us * 1e-6;
}

struct Timed {
  double us = 0, plan_us = 0, error = 0;
  int32_t tile_rows = 0;
};

// The cache is copied often enough that no call finds its keys in the L2.
inline Timed time_variant(const Variant& variant, int32_t batch, int32_t tokens, int32_t heads, int32_t queries) {
  using Element = __nv_bfloat16;
  constexpr double kColdBytes = 200e6;
  const double bytes = double{1} * batch * tokens * kWidth * sizeof(Element);
  const int copies = bytes >= kColdBytes ? 1 : static_cast<int>(kColdBytes / bytes) + 1;
  DecodeShapes shapes;
  shapes.variant = &variant;
  shapes.heads = heads;
  shapes.max_q_len = queries;
  shapes.kv_lens.assign(static_cast<size_t>(batch), tokens);
  std::vector<DecodeCase<Element>> cases;
  Timed timed;
  for (int i = 0; i < copies; ++i) {
    shapes.seed = 100 + i;
    cases.emplace_back(shapes);
    cases.back().run();
    if (i == 0) timed.error = cases.back().verify().out;
  }
  synchronize();
  const int calls = std::max(copies, 5);
  timed.us = time_calls(calls, [&](int i) { check(decode(cases[i % copies].params(), device())); });
  timed.plan_us = time_calls(10, [&](int) { cases[0].make_plan(); });
  timed.tile_rows = cases[0].params().plan.tile_rows;
  return timed;
}

inline void time_decode(int32_t batch, int32_t tokens, int32_t heads, int32_t queries) {
  const double bytes = double{1} * batch * tokens * kWidth * 2;
  const double flops = 2.0 * batch * queries * heads * tokens * (kWidth + kLatent);
  std::printf("decode %4d x %6d x %3d heads x %d:", batch, tokens, heads, queries);
  for (const Variant& variant : decode_variants()) {
    const Timed t = time_variant(variant, batch, tokens, heads, queries);
    std::printf("  %s (%d rows) %8.1f us %5.2f TB/s %6.1f TFLOP/s error %.1e plan %4.1f us", variant.name.c_str(),
                t.tile_rows, t.us, bytes / t.us * 1e-6, flops / t.us * 1e-6, t.error, t.plan_us);
  }
  std::printf("\n");
  std::fflush(stdout);
}

inline void time_all() {
  std::printf("copy of 1 GiB: %.2f TB/s, read and written\n", time_copy());
  time_decode(128, 4096, 24, 1);
  time_decode(128, 4096, 16, 1);
  time_decode(128, 4096, 24, 2);
  time_decode(128, 1024, 24, 1);
  time_decode(8, 4096, 24, 1);
  time_decode(1, 8192, 24, 1);
  time_decode(1, 131072, 24, 1);
  time_decode(16, 100000, 24, 1);
  time_decode(128, 4096, 24, 4);
  time_decode(128, 4096, 128, 1);
  time_decode(1, 512, 24, 1);
}

}  // namespace mla::test
