// Tests of the AMD kernels through the module's entry functions, as a library that tests/test_rocm.py loads after a HIP
// runtime: on a machine with a GPU ROCm's, else the stand-in of hip_standin.cc.
#include <cstdio>
#include <functional>
#include <map>
#include <thread>

#include "tests/native/decode_groups.h"
#include "tests/native/helper_groups.h"
#include "tests/native/rocm_decode_groups.h"
#include "tests/native/rocm_groups.h"
#include "tests/native/rocm_padding_group.h"
#include "tests/native/rocm_prefill_groups.h"
#include "tests/native/rocm_sparse_groups.h"

namespace mla::test {
namespace {

const std::map<std::string, std::function<void()>>& groups() {
  static const std::map<std::string, std::function<void()>> kGroups = {
      {"update_cache", test_update_cache},
      {"update_ds_mla", test_update_ds_mla},
      {"casts", [] { test_casts(device_with(1)); }},
      {"merge_states", test_merge_states},
      {"pack_kv", test_pack_kv},
      {"pack_tiles", test_pack_tiles},
      {"gather_context", test_gather_context},
      {"plan", test_plan},
      {"plan_rule", [] { test_plan_rule(device_with(1)); }},
      {"reduce", test_reduce},
      {"refusals", test_refusals},
      {"padding", test_padding},
      {"prefill", test_prefill},
      {"prefill_refusals", test_prefill_refusals},
      {"decode", test_amd_decode},
      {"decode_bad_values", test_amd_bad_values},
      {"decode_garbage", test_amd_garbage},
      {"decode_hidden_nan", test_amd_hidden_nan},
      {"decode_refusals", test_amd_decode_refusals},
      {"decode_same_bits", test_amd_same_bits},
      {"sparse_decode", test_amd_sparse},
      {"sparse_decode_edges", test_amd_sparse_edges},
      {"sparse_decode_refusals", test_amd_sparse_refusals},
  };
  return kGroups;
}

void give(const std::string& text, char* target, size_t capacity) {
  std::snprintf(target, capacity, "%s", text.c_str());
}

}  // namespace
}  // namespace mla::test

extern "C" {

#pragma GCC visibility push(default)

// Runs a group on a device: how many checks it made, or -1 where it does not exist. `text`: the first failures, a line
// each; empty where there were none.
int64_t mla_rocm_run(const char* group, int ordinal, bool few, char* text, size_t capacity) {
  using namespace mla::test;
  const auto found = groups().find(group);
  if (found == groups().end()) return -1;
  report = Report();
  quick = few;
  mla::test::ordinal = ordinal;
  found->second();
  give(report.text(), text, capacity);
  return report.all_checks();
}

// The names of all groups, a line each.
void mla_rocm_groups(char* text, size_t capacity) {
  std::string names;
  for (const auto& [name, run] : mla::test::groups()) names += name + "\n";
  mla::test::give(names, text, capacity);
}

// A small merge_states on a device: what the entry function says.
void mla_rocm_merge(int ordinal, char* text, size_t capacity) {
  using namespace mla::test;
  mla::test::ordinal = ordinal;
  give(small_merge(), text, capacity);
}

// The same from several threads at once: all that they said.
void mla_rocm_merge_from_threads(int ordinal, int threads, char* text, size_t capacity) {
  using namespace mla::test;
  mla::test::ordinal = ordinal;
  std::vector<std::string> said(threads);
  std::vector<std::thread> all;
  for (int i = 0; i < threads; ++i) all.emplace_back([&said, i] { said[i] = small_merge(); });
  for (std::thread& thread : all) thread.join();
  std::string joined;
  for (const std::string& each : said) joined += each;
  give(joined, text, capacity);
}

// Likewise a small copy on the device.
void mla_rocm_copy(int ordinal, char* text, size_t capacity) {
  using namespace mla::test;
  Buffer<float> from(4, 1.0f), to(4);
  give(mla::copy(to.data(), from.data(), 16, mla::Device{nullptr, ordinal}), text, capacity);
}

// What a call says where there is no runtime, and so no memory.
void mla_rocm_refusal_without_runtime(char* text, size_t capacity) {
  mla::MergeStatesParams params{};
  params.rows = params.width = 1;
  mla::test::give(mla::merge_states(params, mla::Device{nullptr, 0}), text, capacity);
}

// The bytes of scratch that prefill in e4m3fn asks for.
int64_t mla_rocm_prefill_scratch(int32_t tokens, int64_t stored, int32_t heads, int32_t batch) {
  mla::PrefillParams p{};
  p.tokens = tokens;
  p.stored = stored;
  p.heads = heads;
  p.batch = batch;
  p.dtype = p.v_dtype = mla::DType::kE4M3FN;
  return mla::prefill_scratch_bytes(p);
}

#pragma GCC visibility pop
}
