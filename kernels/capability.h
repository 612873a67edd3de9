// What a native module can do, as data: rows that Python reads once and dispatches on. A kernel that is not in the
// table is never called; adding a head count, a dtype or an architecture adds rows.
#pragma once

#include <cstdint>
#include <vector>

namespace mla {

struct Range {  // first, first + step, ..., up to and including last
  int32_t first, last, step;
};

inline bool contains(const Range& range, int32_t n) {
  return n >= range.first && n <= range.last && (n - range.first) % range.step == 0;
}

// JAX's names of dtypes, as rows have them.
namespace dtype_names {
inline constexpr const char* kBF16 = "bfloat16";
inline constexpr const char* kF16 = "float16";
inline constexpr const char* kF32 = "float32";
inline constexpr const char* kE4M3FN = "float8_e4m3fn";
inline constexpr const char* kE4M3FNUZ = "float8_e4m3fnuz";
inline constexpr const char* kDsMla = "fp8_ds_mla";
}  // namespace dtype_names

struct Capability {
  const char* operation;               // "mla_decode", "update_cache", ...
  const char* variant;                 // "generic", "sm90", "avx512", ...
  const char* architecture;            // "x86_64", "sm_90", "sm_80+" (that and later), "gfx950", ...
  const char* q_dtype;                 // JAX's name of the dtype; for update_cache and pack_kv the input's
  const char* cache_dtype;             // of the cache, of prefill's values, or of the packed output
  std::vector<Range> planner_heads;    // counts the work planner takes (empty for operations without heads)
  std::vector<Range> reducer_heads;    // counts the reduction takes
  std::vector<int32_t> tile_rows;      // (query, head) rows a tile may have, ascending
  int32_t max_q_len;                   // 0: any
  std::vector<Range> page_sizes = {};  // empty: any
  bool positive_scale = false;         // the scale of the scores has to be above 0
  bool key_parts = false;              // prefill takes a key's nope and rope part apart too
  bool largest_if_several = false;     // several tiles of a request have the most rows, and not as few as will do
  bool by_name = false;                // chosen by its variant's name alone: its tests have not passed on hardware yet
};

// Best variant first. The CPU's leaves out what this machine cannot execute.
std::vector<Capability> capabilities();

// Every variant compiled in, whatever this machine runs: DecodeParams::variant counts them from 1.
std::vector<const char*> variants();

// How many parts the planner should cut for each unit of the device (multiprocessor, thread).
int32_t parts_per_unit();

}  // namespace mla
