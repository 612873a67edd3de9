// Writes latent and rope rows into their slots.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cache/ds_mla_scale.h"
#include "kernels/cpu/rows.h"
#include "kernels/entry.h"

namespace mla {
namespace {

constexpr int64_t kTokensPerTask = 16;

// A token as fp8_ds_mla, from fp32 on: what is not finite has no part in its scale, and the cast makes it NaN.
void store_ds_mla(char* row, const char* latent, const char* rope, const UpdateCacheParams& p) {
  const cpu::RowKernels& kernels = cpu::row_kernels();
  float values[kLatent];
  kernels.convert(DType::kF32, p.input_dtype)(values, latent, kLatent, {});
  for (int group = 0; group < kLatent / kDsMlaGroup; ++group) {
    const float* const first = values + group * kDsMlaGroup;
    float largest = 0;
    for (int i = 0; i < kDsMlaGroup; ++i) {
      const float magnitude = std::fabs(first[i]);
      largest = magnitude > largest && std::isfinite(magnitude) ? magnitude : largest;
    }
    cpu::Conversion conversion;
    conversion.divide = ds_mla_scale(largest, p.power_of_two_scales);
    kernels.convert(DType::kE4M3FN, DType::kF32)(row + group * kDsMlaGroup, first, kDsMlaGroup, conversion);
    std::memcpy(row + kLatent + group * sizeof(float), &conversion.divide, sizeof(float));
  }
  char* const target = row + kDsMlaBytes - kRope * 2;
  if (p.input_dtype == DType::kBF16) {
    std::memcpy(target, rope, kRope * 2);
  } else {
    kernels.convert(DType::kBF16, p.input_dtype)(target, rope, kRope, {});
  }
}

}  // namespace

Error update_cache(const UpdateCacheParams& p, const Device& device) {
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  if (layer < 0 || layer >= p.layers || p.tokens <= 0) return {};

  const int64_t slots = p.pages * p.page_size;
  const int64_t cache_size = cpu::size_of(p.cache_dtype), input_size = cpu::size_of(p.input_dtype);
  const int64_t row_size = p.ds_mla ? kDsMlaBytes : kWidth * cache_size;
  char* const cache = static_cast<char*>(p.cache) + layer * slots * row_size;
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
      char* const row = cache + slot * row_size;
      const char* const latent = kv_c + t * kLatent * input_size;
      const char* const rope = k_pe + t * kRope * input_size;
      if (p.ds_mla) {
        store_ds_mla(row, latent, rope, p);
      } else if (same) {
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
