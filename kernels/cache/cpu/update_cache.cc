// Writes latent and rope rows into their slots.
#include <algorithm>
#include <cstring>

#include "kernels/cpu/rows.h"
#include "kernels/entry.h"

namespace mla {
namespace {

constexpr int64_t kTokensPerTask = 16;

}  // namespace

Error update_cache(const UpdateCacheParams& p, const Device& device) {
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  if (layer < 0 || layer >= p.layers || p.tokens <= 0) return {};

  const int64_t slots = p.pages * p.page_size;
  const int64_t cache_size = cpu::size_of(p.cache_dtype), input_size = cpu::size_of(p.input_dtype);
  char* const cache = static_cast<char*>(p.cache) + layer * slots * kWidth * cache_size;
  const char* const kv_c = static_cast<const char*>(p.kv_c);
  const char* const k_pe = static_cast<const char*>(p.k_pe);
  const bool same = p.cache_dtype == p.input_dtype;
  const cpu::ConvertRow convert = cpu::row_kernels().convert(p.cache_dtype, p.input_dtype);
  cpu::Conversion conversion;
  conversion.divide = p.k_scale == nullptr ? 1.0f : p.k_scale[p.k_scales > 1 ? layer : 0];
  conversion.saturate = p.saturate;

  // Each slot belongs to one task, which takes its tokens in order: of duplicates the last one wins, whole.
  const int64_t tasks = std::clamp<int64_t>(p.tokens / kTokensPerTask, 1, std::max(device.threads, 1));
  const auto run = [&](int64_t task) {
    for (int64_t t = 0; t < p.tokens; ++t) {
      const int64_t slot = p.slot_mapping[t];
      if (slot < 0 || slot >= slots || slot % tasks != task) continue;
      char* const row = cache + slot * kWidth * cache_size;
      const char* const latent = kv_c + t * kLatent * input_size;
      const char* const rope = k_pe + t * kRope * input_size;
      if (same) {
        std::memcpy(row, latent, kLatent * cache_size);
        std::memcpy(row + kLatent * cache_size, rope, kRope * cache_size);
      } else {
        convert(row, latent, kLatent, conversion);
        convert(row + kLatent * cache_size, rope, kRope, conversion);
      }
    }
  };
  if (tasks == 1) {
    run(0);
  } else {
    device.parallel_for(tasks, run);
  }
  return {};
}

}  // namespace mla
