// Tests the CUDA kernels without Python or XLA:
//   mla_cuda_driver [--quick] [--variant NAME[,DTYPES]] [--time [--cells N,N,..] [--tile-rows N] [--page-size N]]
//
// Random data, poisoned results, NaN wherever nothing may be read; oracles in double precision. --quick: a small
// selection, for compute-sanitizer. --variant: mla_prefill alone ("prefill", or "prefill:NAME" by that variant),
// packing, gather and merging alone ("context"), mla_sparse_decode alone ("sparse", or "sparse:NAME" by that variant),
// plans, updates and what is left ("others"), decode by that variant alone; a variant may be followed by dtypes
// ("bf16", "f16", "e4m3fn"; "bf16/e4m3fn" of decode's queries and cache, "e4m3fn/bf16" of prefill's keys and values).
// --time: device times instead of tests, of the cells (numbers of kCells in cuda_timing.h or of kPrefillCells) that
// --cells names, decode's with other tiles or pages than usual; with --variant update, of update_cache alone. Exits
// with 1 at the first mismatch.
#include <chrono>

#include "tests/native/cuda_context_timing.h"
#include "tests/native/cuda_decode_groups.h"
#include "tests/native/cuda_gather_group.h"
#include "tests/native/cuda_helper_groups.h"
#include "tests/native/cuda_pack_group.h"
#include "tests/native/cuda_plan_group.h"
#include "tests/native/cuda_prefill_group.h"
#include "tests/native/cuda_prefill_timing.h"
#include "tests/native/cuda_sparse_group.h"
#include "tests/native/cuda_timing.h"

namespace mla::test {
namespace {

struct Group {
  const char* name;
  std::string (*run)(bool quick);
};

struct DecodeGroup {
  const char* name;
  std::string (*run)(const Variant& variant, bool quick);
};

struct PrefillGroup {
  const char* name;
  std::string (*run)(const PrefillVariant& variant, bool quick);
};

constexpr DecodeGroup kDecodeGroups[] = {
    {"the oracle itself", oracle_group},
    {"heads 1 to 128", heads_group},
    {"heads, queries, pages, dtypes", shapes_group},
    {"long requests", long_group},
    {"steep scores", steep_group},
    {"scales and codes of fp8", scales_group},
    {"NaN in a token", nan_group},
    {"lengths, pages, layers out of range", edges_group},
    {"bad plans", bad_plans_group},
    {"addresses past 2^31 elements", far_group},
    {"less shared memory", small_memory_group},
    {"repeats", repeats_group},
    {"batch invariance", invariance_group},
    {"refusals", refusals_group},
    {"choice of the variant", choice_group},
};

constexpr PrefillGroup kPrefillGroups[] = {
    {"ragged batches", prefill_group},    {"long requests, far addresses", prefill_long_group},
    {"repeats", prefill_repeats_group},   {"lengths out of range", prefill_lengths_group},
    {"refusals", prefill_refusals_group},
};

constexpr Group kContextGroups[] = {
    {"pack_kv", pack_group},
    {"pack_kv: all dtypes and codes", pack_casts_group},
    {"gather_context", gather_group},
    {"gather_context: lengths out of range", gather_garbage_group},
    {"gather_context: far addresses", gather_far_group},
    {"merge_states", merge_group},
};

struct SparseGroup {
  const char* name;
  std::string (*run)(const std::vector<SparseCell>& cells, bool quick);
};

constexpr SparseGroup kSparseGroups[] = {
    {"mla_sparse_decode: heads, top-k, dtypes", sparse_group},
    {"mla_sparse_decode: empty rows", sparse_empty_group},
    {"mla_sparse_decode: repeats", sparse_repeats_group},
    {"mla_sparse_decode: choice of the variant", sparse_choice_group},
    {"mla_sparse_decode: refusals", sparse_refusals_group},
};

constexpr Group kOtherGroups[] = {
    {"mla_prefill: choice of the variant", prefill_choice_group},
    {"plan_decode", plan_group},
    {"mla_decode over fp8_ds_mla", dense_ds_mla_group},
    {"update_cache", update_group},
    {"update_cache: fp8_ds_mla", update_ds_mla_group},
    {"update_cache: casts to e4m3fn", cast_group},
};

template <class Run>
void run_group(const std::string& name, Run run) {
  const auto start = std::chrono::steady_clock::now();
  const std::string text = run();
  check(cudaDeviceSynchronize());
  check(cudaGetLastError());
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("ok  %-52s %6.1f s  %s\n", name.c_str(), seconds, text.c_str());
  std::fflush(stdout);
}

int run_all(bool quick, const std::string& only) {
  const std::vector<SparseCell> sparse = sparse_cells(only.empty() ? "sparse" : only);
  bool known = only.empty() || only == "context" || only == "others" || !sparse.empty();
  for (const Variant& variant : decode_variants()) {
    if (!selected(variant, only)) continue;
    known = true;
    for (const DecodeGroup& group : kDecodeGroups) {
      run_group(variant.name + " " + variant.dtypes() + ": " + group.name, [&] { return group.run(variant, quick); });
    }
  }
  for (const PrefillVariant& variant : prefill_variants()) {
    if (!selected(variant, only)) continue;
    known = true;
    for (const PrefillGroup& group : kPrefillGroups) {
      run_group("mla_prefill " + variant.name + " " + variant.dtypes() + ": " + group.name,
                [&] { return group.run(variant, quick); });
    }
  }
  require(known, "this device has no variant " + only);
  for (const Group& group : kContextGroups) {
    if (only.empty() || only == "context") run_group(group.name, [&] { return group.run(quick); });
  }
  for (const SparseGroup& group : kSparseGroups) {
    if (!sparse.empty()) run_group(group.name, [&] { return group.run(sparse, quick); });
  }
  for (const Group& group : kOtherGroups) {
    if (only.empty() || only == "others") run_group(group.name, [&] { return group.run(quick); });
  }
  std::printf("all groups passed\n");
  return 0;
}

}  // namespace
}  // namespace mla::test

int main(int argc, char** argv) {
  bool quick = false, time = false;
  std::string variant, cells;
  mla::test::Forced forced;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    quick = quick || argument == "--quick";
    time = time || argument == "--time";
    if (argument == "--quick" || argument == "--time") continue;
    if ((argument == "--variant" || argument == "--cells") && i + 1 < argc) {
      (argument == "--variant" ? variant : cells) = argv[++i];
      continue;
    }
    if ((argument == "--tile-rows" || argument == "--page-size") && i + 1 < argc) {
      (argument == "--tile-rows" ? forced.tile_rows : forced.page_size) = std::atoi(argv[++i]);
      continue;
    }
    std::fprintf(stderr,
                 "usage: %s [--quick] [--variant NAME[,DTYPES]] [--time [--cells N,N,..] [--tile-rows N] "
                 "[--page-size N]]\n",
                 argv[0]);
    return 2;
  }
  if (!time) return mla::test::run_all(quick, variant);
  if (variant.rfind("prefill", 0) == 0) {
    for (const auto& each : mla::test::prefill_variants()) {
      if (mla::test::timed(each, variant)) mla::test::time_prefill(each, cells);
    }
  } else if (variant == "context") {
    mla::test::time_context();
  } else if (variant == "update") {
    mla::test::time_updates();
  } else if (variant.rfind("sparse", 0) == 0) {
    mla::test::time_sparse(variant);
  } else {
    mla::test::time_all(variant, cells, forced);
  }
  return 0;
}
