#include "kernels/capability.h"

#include <iterator>

#include "kernels/decode/sm90/fp8/limits.h"
#include "kernels/decode/sm90/limits.h"
#include "kernels/sparse/sm90/limits.h"

namespace mla {
namespace {

using namespace dtype_names;
constexpr const char* kKernelValues = "kernel_values";  // e4m3fn in tiles, as kValueTile says
constexpr const char* kArchitecture = "sm_80+";

Capability row(const char* operation, const char* q_dtype, const char* cache_dtype) {
  return {operation, "generic", kArchitecture, q_dtype, cache_dtype, {}, {}, {}, 0, {}};
}

// Every kernel of decode, dense or sparse, takes every count of heads.
Capability decode_row(const char* q_dtype, const char* cache_dtype) {
  Capability decode = row("mla_decode", q_dtype, cache_dtype);
  decode.planner_heads = decode.reducer_heads = {{1, 128, 1}, {144, 4096, 16}};
  decode.tile_rows = {16, 32, 64};
  return decode;
}

Capability sparse_row(const char* q_dtype, const char* cache_dtype) {
  Capability sparse = decode_row(q_dtype, cache_dtype);
  sparse.operation = "mla_sparse_decode";
  return sparse;
}

// Whole keys and keys in parts.
Capability prefill_row(const char* dtype) {
  Capability prefill = row("mla_prefill", dtype, dtype);
  prefill.key_parts = true;
  return prefill;
}

#if defined(JAX_MLA_SM90)
// sm_90a's instructions are of compute capability 9.0 alone.
Capability sm90_row(const char* dtype) {
  Capability decode = decode_row(dtype, dtype);
  decode.variant = "sm90";
  decode.architecture = "sm_90";
  decode.tile_rows.assign(std::begin(sm90::kTileSizes), std::end(sm90::kTileSizes));
  decode.page_sizes.assign(std::begin(sm90::kPageSizes), std::end(sm90::kPageSizes));
  return decode;
}

Capability sm90_fp8_row(const char* q_dtype) {
  Capability decode = sm90_row(q_dtype);
  decode.cache_dtype = kE4M3FN;
  decode.tile_rows.assign(std::begin(sm90::fp8::kTileSizes), std::end(sm90::fp8::kTileSizes));
  decode.page_sizes.assign(std::begin(sm90::fp8::kPageSizes), std::end(sm90::fp8::kPageSizes));
  return decode;
}

Capability sm90_sparse_row(const char* q_dtype, const char* cache_dtype) {
  Capability sparse = sparse_row(q_dtype, cache_dtype);
  sparse.variant = "sm90";
  sparse.architecture = "sm_90";
  sparse.tile_rows.assign(std::begin(sparse_sm90::kTileSizes), std::end(sparse_sm90::kTileSizes));
  return sparse;
}

Capability sm90_prefill_row(Capability prefill) {
  prefill.variant = "sm90";
  prefill.architecture = "sm_90";
  return prefill;
}
#endif

}  // namespace

std::vector<Capability> capabilities() {
  std::vector<Capability> rows;
  // The first row that can serve a call does.
#if defined(JAX_MLA_SM90)
  for (const char* dtype : {kBF16, kF16}) {
    rows.push_back(sm90_prefill_row(prefill_row(dtype)));
    rows.back().positive_scale = true;
  }
  for (const char* v_dtype : {kBF16, kKernelValues}) {
    rows.push_back(sm90_prefill_row(row("mla_prefill", kE4M3FN, v_dtype)));
  }
  for (const char* dtype : {kBF16, kF16}) {
    rows.push_back(sm90_row(dtype));
    rows.back().largest_if_several = true;  // several tiles of 64 rows take no longer than narrow ones: docs/hopper.md
  }
  for (const char* q_dtype : {kBF16, kF16, kE4M3FN}) rows.push_back(sm90_fp8_row(q_dtype));
  for (const char* dtype : {kBF16, kF16}) rows.push_back(sm90_sparse_row(dtype, dtype));
  for (const char* q_dtype : {kBF16, kF16, kE4M3FN}) rows.push_back(sm90_sparse_row(q_dtype, kE4M3FN));
  rows.push_back(sm90_sparse_row(kBF16, kDsMla));
  rows.back().tile_rows.assign(std::begin(sparse_sm90::kDsMlaTileSizes), std::end(sparse_sm90::kDsMlaTileSizes));
#endif
  for (const char* dtype : {kBF16, kF16}) rows.push_back(prefill_row(dtype));
  rows.push_back(decode_row(kBF16, kBF16));
  rows.push_back(decode_row(kF16, kF16));
  for (const char* q_dtype : {kBF16, kF16, kE4M3FN}) rows.push_back(decode_row(q_dtype, kE4M3FN));
  rows.push_back(decode_row(kBF16, kDsMla));
  rows.push_back(sparse_row(kBF16, kBF16));
  rows.push_back(sparse_row(kF16, kF16));
  for (const char* q_dtype : {kBF16, kF16, kE4M3FN}) rows.push_back(sparse_row(q_dtype, kE4M3FN));
  rows.push_back(sparse_row(kBF16, kDsMla));
  for (const char* dtype : {kBF16, kF16, kF32}) {
    rows.push_back(row("update_cache", dtype, dtype));
    rows.push_back(row("update_cache", dtype, kE4M3FN));
    rows.push_back(row("update_cache", dtype, kDsMla));
    rows.push_back(row("merge_states", dtype, dtype));
    rows.push_back(row("pack_kv", dtype, dtype));
    for (const char* packed : {kE4M3FN, kE4M3FNUZ}) rows.push_back(row("pack_kv_fp8", dtype, packed));
  }
  for (const char* q_dtype : {kBF16, kF16, kF32}) {
    for (const char* cache_dtype : {kBF16, kF16, kF32, kE4M3FN, kE4M3FNUZ, kDsMla}) {
      rows.push_back(row("mla_context", q_dtype, cache_dtype));
    }
  }
  return rows;
}

std::vector<const char*> variants() {
#if defined(JAX_MLA_SM90)
  return {"generic", "sm90"};
#else
  return {"generic"};
#endif
}

int32_t parts_per_unit() { return 1; }

}  // namespace mla
