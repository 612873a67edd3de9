#include "kernels/capability.h"

namespace mla {
namespace {

constexpr const char* kBF16 = "bfloat16";
constexpr const char* kF16 = "float16";
constexpr const char* kF32 = "float32";
constexpr const char* kE4M3FN = "float8_e4m3fn";
constexpr const char* kArchitecture = "sm_80+";

Capability row(const char* operation, const char* q_dtype, const char* cache_dtype) {
  return {operation, "generic", kArchitecture, q_dtype, cache_dtype, {}, {}, {}, 0};
}

Capability decode_row(const char* dtype) {
  Capability decode = row("mla_decode", dtype, dtype);
  decode.planner_heads = decode.reducer_heads = {{1, 128, 1}, {144, 4096, 16}};
  decode.tile_rows = {16, 32, 64};
  return decode;
}

}  // namespace

std::vector<Capability> capabilities() {
  std::vector<Capability> rows = {decode_row(kBF16), decode_row(kF16)};
  for (const char* dtype : {kBF16, kF16, kF32}) {
    rows.push_back(row("update_cache", dtype, dtype));
    rows.push_back(row("update_cache", dtype, kE4M3FN));
    rows.push_back(row("merge_states", dtype, dtype));
  }
  return rows;
}

std::vector<const char*> variants() { return {"generic"}; }

int32_t parts_per_unit() { return 1; }

}  // namespace mla
