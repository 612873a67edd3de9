// Tests of the AMD kernels through the module's entry functions, as a library that tests/test_rocm.py loads after a HIP
// runtime: on a machine with a GPU ROCm's, else the stand-in of hip_standin.cc.
#include <cstdio>
#include <functional>
#include <map>

#include "tests/native/decode_groups.h"
#include "tests/native/helper_groups.h"
#include "tests/native/rocm_groups.h"

namespace mla::test {
namespace {

const std::map<std::string, std::function<void()>>& groups() {
  static const std::map<std::string, std::function<void()>> kGroups = {
      {"update_cache", test_update_cache},
      {"casts", [] { test_casts(device_with(1)); }},
      {"merge_states", test_merge_states},
      {"pack_kv", test_pack_kv},
      {"pack_tiles", test_pack_tiles},
      {"gather_context", test_gather_context},
      {"plan", test_plan},
      {"plan_rule", [] { test_plan_rule(device_with(1)); }},
      {"reduce", test_reduce},
      {"refusals", test_refusals},
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

#pragma GCC visibility pop
}
