// Rows of one chunk of cached context, from the pages where they lie into a workspace, dequantised.
#include <algorithm>
#include <cstring>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/rows.h"
#include "kernels/entry.h"

namespace mla {
namespace {

constexpr int64_t kGrainRows = 32;

// n values of a row, converted or, where nothing would change, copied.
struct Part {
  cpu::ConvertRow convert;  // null: copy
  int64_t size;             // bytes an element of the output

  Part(DType target, DType source, bool scaled)
      : convert(target == source && !scaled ? nullptr : cpu::row_kernels().convert(target, source)),
        size(cpu::size_of(target)) {}

  void operator()(char* target, const char* source, int64_t n, float scale) const {
    if (convert == nullptr) {
      std::memcpy(target, source, n * size);
    } else {
      convert(target, source, n, {scale, 1.0f, false});
    }
  }
};

// Where in the cache the rows of the workspace lie.
class Rows {
 public:
  explicit Rows(const GatherContextParams& p)
      : p_(p), row_bytes_(p.ds_mla ? kDsMlaBytes : kWidth * cpu::size_of(p.cache_dtype)) {
    const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
    if (layer < 0 || layer >= p.layers) return;
    cache_ = static_cast<const char*>(p.cache) + layer * p.pages * p.page_size * row_bytes_;
    scale_ = p.k_scale == nullptr ? 1.0f : p.k_scale[p.k_scales > 1 ? layer : 0];
  }

  float scale() const { return scale_; }

  // The row of the workspace's row w, or null. `request` is a place to start looking from, and is moved on.
  const char* at(int64_t w, int32_t& request) const {
    while (request < p_.batch && w >= p_.cu_kv_lens[request + 1]) ++request;
    if (cache_ == nullptr || request == p_.batch || w < p_.cu_kv_lens[request]) return nullptr;
    const int64_t token = p_.starts[request] + (w - p_.cu_kv_lens[request]);
    if (token < 0 || token / p_.page_size >= p_.max_pages) return nullptr;
    const int64_t page = p_.page_table[int64_t{request} * p_.max_pages + token / p_.page_size];
    if (page < 0 || page >= p_.pages) return nullptr;
    return cache_ + (page * p_.page_size + token % p_.page_size) * row_bytes_;
  }

 private:
  const GatherContextParams& p_;
  int64_t row_bytes_;
  const char* cache_ = nullptr;  // the layer's first page; null where there is no such layer
  float scale_ = 1.0f;
};

}  // namespace

Error gather_context(const GatherContextParams& p, const Device& device) {
  const Rows rows(p);
  const int64_t latent_bytes = kLatent * cpu::size_of(p.output_dtype),
                rope_bytes = kRope * cpu::size_of(p.output_dtype);
  const Part latent_part(p.output_dtype, p.cache_dtype, p.ds_mla || rows.scale() != 1.0f);
  const Part rope_part(p.output_dtype, p.ds_mla ? DType::kBF16 : p.cache_dtype, !p.ds_mla && rows.scale() != 1.0f);

  const auto gather = [&](int64_t begin, int64_t end) {
    int32_t request = 0;
    for (int64_t w = begin; w < end; ++w) {
      char* const latent = static_cast<char*>(p.latent) + w * latent_bytes;
      char* const rope = static_cast<char*>(p.rope) + w * rope_bytes;
      const char* const row = rows.at(w, request);
      if (row == nullptr) {
        std::memset(latent, 0, latent_bytes);
        std::memset(rope, 0, rope_bytes);
      } else if (p.ds_mla) {
        for (int group = 0; group < kLatent / kDsMlaGroup; ++group) {
          float scale;
          std::memcpy(&scale, row + kLatent + group * sizeof(scale), sizeof(scale));
          latent_part(latent + group * (latent_bytes / (kLatent / kDsMlaGroup)), row + group * kDsMlaGroup, kDsMlaGroup,
                      scale);
        }
        rope_part(rope, row + kDsMlaBytes - kRope * cpu::size_of(DType::kBF16), kRope, 1.0f);
      } else {
        latent_part(latent, row, kLatent, rows.scale());
        rope_part(rope, row + kLatent * cpu::size_of(p.cache_dtype), kRope, rows.scale());
      }
    }
  };
  cpu::parallel_ranges(device, p.rows, kGrainRows, gather);
  return {};
}

}  // namespace mla
