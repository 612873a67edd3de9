#include "kernels/capability.h"

#include "kernels/cpu/isa.h"

namespace mla {
namespace {

#if defined(__x86_64__)
constexpr const char* kArchitecture = "x86_64";
#elif defined(__aarch64__)
constexpr const char* kArchitecture = "aarch64";
#else
constexpr const char* kArchitecture = "other";
#endif

using namespace dtype_names;

struct Pair {
  const char* first;   // of q, or of the input
  const char* second;  // of the cache, or of the packed output
};

constexpr Pair kDecodePairs[] = {
    {kBF16, kBF16},         {kF16, kF16},    {kF32, kF32},      {kBF16, kE4M3FN},
    {kBF16, kE4M3FNUZ},     {kF16, kE4M3FN}, {kF16, kE4M3FNUZ}, {kE4M3FN, kE4M3FN},
    {kE4M3FNUZ, kE4M3FNUZ}, {kBF16, kDsMla}, {kF16, kDsMla},
};
constexpr Pair kSamePairs[] = {{kBF16, kBF16}, {kF16, kF16}, {kF32, kF32}};
constexpr Pair kFp8Pairs[] = {
    {kBF16, kE4M3FN}, {kBF16, kE4M3FNUZ}, {kF16, kE4M3FN}, {kF16, kE4M3FNUZ}, {kF32, kE4M3FN}, {kF32, kE4M3FNUZ},
};

}  // namespace

std::vector<Capability> capabilities() {
  std::vector<Capability> rows;
  const std::vector<Range> heads = {{1, 128, 1}, {144, 4096, 16}};
  for (const char* operation : {"mla_decode", "mla_sparse_decode"}) {
    for (int32_t i = 0; i < cpu::kIsas; ++i) {
      const auto isa = static_cast<cpu::Isa>(i);
      if (!cpu::runs_here(isa)) continue;
      for (const Pair& pair : kDecodePairs) {
        rows.push_back({operation,
                        cpu::name_of(isa),
                        kArchitecture,
                        pair.first,
                        pair.second,
                        heads,
                        heads,
                        {16, 32, 64, 128, 256},
                        0});
      }
    }
  }
  for (int32_t i = 0; i < cpu::kIsas; ++i) {
    const auto isa = static_cast<cpu::Isa>(i);
    if (!cpu::runs_here(isa)) continue;
    for (const Pair& pair : kSamePairs) {
      rows.push_back({"mla_prefill", cpu::name_of(isa), kArchitecture, pair.first, pair.second, {}, {}, {}, 0});
      rows.back().key_parts = true;
    }
  }
  // One entry whatever the machine runs: these wait for memory more than they compute.
  const auto add = [&](const char* operation, const Pair& pair) {
    const char* variant = cpu::name_of(cpu::Isa::kPortable);
    rows.push_back({operation, variant, kArchitecture, pair.first, pair.second, {}, {}, {}, 0});
  };
  for (const Pair& pair : kSamePairs) {
    add("update_cache", pair);
    add("merge_states", pair);
    add("pack_kv", pair);
  }
  for (const Pair& pair : kFp8Pairs) {
    add("update_cache", pair);
    add("pack_kv_fp8", pair);
  }
  for (const char* q_dtype : {kBF16, kF16, kF32}) {
    add("update_cache", {q_dtype, kDsMla});
    for (const char* cache_dtype : {kBF16, kF16, kF32, kE4M3FN, kE4M3FNUZ, kDsMla}) {
      add("mla_context", {q_dtype, cache_dtype});
    }
  }
  return rows;
}

std::vector<const char*> variants() {
  std::vector<const char*> names;
  for (int32_t i = 0; i < cpu::kIsas; ++i) names.push_back(cpu::name_of(static_cast<cpu::Isa>(i)));
  return names;
}

int32_t parts_per_unit() { return 2; }

}  // namespace mla
