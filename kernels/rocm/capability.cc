#include "kernels/capability.h"

#include <cstring>

#include "kernels/rocm/code_objects.h"

namespace mla {
namespace {

constexpr const char* kBF16 = "bfloat16";
constexpr const char* kF16 = "float16";
constexpr const char* kF32 = "float32";
constexpr const char* kE4M3FN = "float8_e4m3fn";
constexpr const char* kE4M3FNUZ = "float8_e4m3fnuz";
constexpr const char* kDsMla = "fp8_ds_mla";

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
    rows_.push_back(row);
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
    for (const char* dtype : {kBF16, kF16, kF32}) {
      for (const char* cached : {dtype, kE4M3FN, kE4M3FNUZ}) {
        rows.add("cache/gfx9/update", "update_cache", dtype, cached);
      }
      rows.add("merge/gfx9/merge", "merge_states", dtype, dtype);
      rows.add("pack/gfx9/pack", "pack_kv", dtype, dtype);
      for (const char* packed : {kE4M3FN, kE4M3FNUZ}) rows.add("pack/gfx9/pack", "pack_kv_fp8", dtype, packed);
    }
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
