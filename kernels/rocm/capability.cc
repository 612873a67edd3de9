#include "kernels/capability.h"

#include <cstring>
#include <iterator>

#include "kernels/decode/gfx9/heads.h"
#include "kernels/decode/gfx9/limits.h"
#include "kernels/rocm/code_objects.h"

namespace mla {
namespace {

using namespace dtype_names;

// The architectures that this build may have code for: names of variants too.
constexpr const char* kArchitectures[] = {"gfx942", "gfx950"};

bool has_code(const char* object, const char* architecture) {
  for (size_t i = 0; i < kCodeObjectCount; ++i) {
    if (std::strcmp(kCodeObjects[i].name, object) == 0 &&
        std::strcmp(kCodeObjects[i].architecture, architecture) == 0) {
      return true;
    }
  }
  return false;
}

// The rows of one architecture, of what the build has code for.
class Rows {
 public:
  Rows(const char* architecture, std::vector<Capability>& rows) : architecture_(architecture), rows_(rows) {}

  void add(const char* object, const char* operation, const char* q_dtype, const char* cache_dtype) {
    if (!has_code(object, architecture_)) return;
    Capability row{operation, architecture_, architecture_, q_dtype, cache_dtype, {}, {}, {}, 0, {}};
    row.by_name = true;  // proven by the emulator alone (docs/amd.md)
    rows_.push_back(row);
  }

  // mla_decode: what its attention, the planner and the reduction take together.
  void add_decode(const char* object, const char* q_dtype, const char* cache_dtype) {
    if (!has_code(object, architecture_)) return;
    add(object, "mla_decode", q_dtype, cache_dtype);
    Capability& row = rows_.back();
    row.planner_heads = gfx9::planner_heads();
    row.reducer_heads = gfx9::reducer_heads();
    row.tile_rows.assign(std::begin(gfx9::kTileSizes), std::end(gfx9::kTileSizes));
  }

  // mla_sparse_decode takes every count of heads: a tile's last rows may not exist.
  void add_sparse_decode(const char* object, const char* q_dtype, const char* cache_dtype) {
    if (!has_code(object, architecture_)) return;
    add(object, "mla_sparse_decode", q_dtype, cache_dtype);
    Capability& row = rows_.back();
    row.planner_heads = row.reducer_heads = {{1, 128, 1}, {144, 4096, 16}};
    row.tile_rows.assign(std::begin(gfx9::kTileSizes), std::end(gfx9::kTileSizes));
  }

 private:
  const char* architecture_;
  std::vector<Capability>& rows_;
};

}  // namespace

std::vector<Capability> capabilities() {
  std::vector<Capability> all;
  for (const char* architecture : kArchitectures) {
    Rows rows(architecture, all);
    const char* own_fp8 = std::strcmp(architecture, "gfx942") == 0 ? kE4M3FNUZ : kE4M3FN;
    rows.add_decode("decode/gfx9/bf16", kBF16, kBF16);
    rows.add_decode("decode/gfx9/f16", kF16, kF16);
    rows.add_decode("decode/gfx9/bf16_fp8", kBF16, own_fp8);
    rows.add_decode("decode/gfx9/f16_fp8", kF16, own_fp8);
    rows.add_decode("decode/gfx9/fp8", own_fp8, own_fp8);
    rows.add_decode("decode/gfx9/bf16_ds_mla", kBF16, kDsMla);
    rows.add_sparse_decode("sparse/gfx9/bf16", kBF16, kBF16);
    rows.add_sparse_decode("sparse/gfx9/f16", kF16, kF16);
    rows.add_sparse_decode("sparse/gfx9/bf16_fp8", kBF16, own_fp8);
    rows.add_sparse_decode("sparse/gfx9/f16_fp8", kF16, own_fp8);
    rows.add_sparse_decode("sparse/gfx9/fp8", own_fp8, own_fp8);
    rows.add_sparse_decode("sparse/gfx9/bf16_ds_mla", kBF16, kDsMla);
    for (const char* dtype : {kBF16, kF16, kF32}) {
      for (const char* cached : {dtype, kE4M3FN, kE4M3FNUZ, kDsMla}) {
        rows.add("cache/gfx9/update", "update_cache", dtype, cached);
      }
      rows.add("merge/gfx9/merge", "merge_states", dtype, dtype);
      rows.add("pack/gfx9/pack", "pack_kv", dtype, dtype);
      for (const char* packed : {kE4M3FN, kE4M3FNUZ}) rows.add("pack/gfx9/pack", "pack_kv_fp8", dtype, packed);
    }
    rows.add("prefill/gfx9/bf16", "mla_prefill", kBF16, kBF16);
    rows.add("prefill/gfx9/f16", "mla_prefill", kF16, kF16);
    rows.add("prefill/gfx950/attention", "mla_prefill", kE4M3FN, kE4M3FN);
    for (const char* dtype : {kBF16, kF16, kF32}) {
      for (const char* cached : {kBF16, kF16, kF32, kE4M3FN, kE4M3FNUZ, kDsMla}) {
        rows.add("context/gfx9/gather", "mla_context", dtype, cached);
      }
    }
  }
  return all;
}

std::vector<const char*> variants() { return {kArchitectures[0], kArchitectures[1]}; }

int32_t parts_per_unit() { return 1; }

}  // namespace mla
