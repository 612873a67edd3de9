// What the handlers of dense and of sparse decode share: the checks of queries and cache, and their part of the params.
#pragma once

#include "ffi/platform.h"

namespace mla {

// The operands of an attention over a cache. q: [T, H, D], or [T, H, L] beside q_rope [T, H, R].
struct AttentionOperands {
  const AnyBuffer& q;
  const AnyBuffer& q_rope;  // empty: q is whole
  const AnyBuffer& cache;   // [layers, pages, P, D], or bytes of fp8_ds_mla [layers, pages, P, 656]
  const AnyBuffer& layer;
  const AnyBuffer& q_scale;
  const AnyBuffer& k_scale;

  bool pair() const { return q_rope.element_count() != 0; }
  bool ds_mla() const { return cache.element_type() == ffi::DataType::U8; }
  // Once the ranks are known to be right.
  int64_t tokens() const { return q.dimensions()[0]; }
  int64_t heads() const { return q.dimensions()[1]; }
  int64_t layers() const { return cache.dimensions()[0]; }
  int64_t pages() const { return cache.dimensions()[1]; }
  int64_t page_size() const { return cache.dimensions()[2]; }

  void check_ranks(Checks& checks) const {
    checks.rank("q", q, 3).rank("cache", cache, 4).floating("q", q);
    if (!ds_mla()) checks.floating("cache", cache);
  }

  void check_shapes(Checks& checks) const {
    checks.shape("q", q, {tokens(), heads(), pair() ? kLatent : kWidth});
    if (pair()) checks.shape("q_rope", q_rope, {tokens(), heads(), kRope});
    checks.that(!pair() || q_rope.element_type() == q.element_type(), "q and q_rope differ in dtype");
    checks.shape("cache", cache, {layers(), pages(), page_size(), ds_mla() ? kDsMlaBytes : kWidth});
    checks.holds("layer", layer, 1, /*optional=*/layers() == 1);
    checks.holds("q_scale", q_scale, 1, /*optional=*/true).holds("k_scale", k_scale, 1, /*optional=*/true);
    checks.that(k_scale.element_count() <= 1 || k_scale.element_count() == static_cast<size_t>(layers()),
                "k_scale has " + std::to_string(k_scale.element_count()) + " elements, expected 1 or " +
                    std::to_string(layers()));
  }

  // Params: DecodeParams or SparseDecodeParams.
  template <class Params>
  void fill(Params& params) const {
    params.q_latent = q.untyped_data();
    params.q_latent_stride = pair() ? kLatent : kWidth;
    const int64_t rope_offset = kLatent * static_cast<int64_t>(ffi::ByteWidth(q.element_type()));
    params.q_rope = pair() ? q_rope.untyped_data() : data<char>(q) + rope_offset;
    params.q_rope_stride = pair() ? kRope : kWidth;
    params.cache = cache.untyped_data();
    params.layer = optional_data<int32_t>(layer);
    params.q_scale = optional_data<float>(q_scale);
    params.k_scale = optional_data<float>(k_scale);
    params.layers = static_cast<int32_t>(layers());
    params.tokens = static_cast<int32_t>(tokens());
    params.heads = static_cast<int32_t>(heads());
    params.k_scales = static_cast<int32_t>(k_scale.element_count());
    params.q_dtype = *dtype_of(q);
    params.ds_mla = ds_mla();
    params.cache_dtype = ds_mla() ? DType::kE4M3FN : *dtype_of(cache);
  }
};

// The results: out [T, H, L], lse [T, H], and the scratch, which has its own shapes.
template <class Params>
void fill_results(Params& params, Result& out, Result& lse, Result& partial_out, Result& partial_lse) {
  params.out = out->untyped_data();
  params.lse = data<float>(*lse);
  params.partial_out = data<float>(*partial_out);
  params.partial_lse = data<float>(*partial_lse);
  params.out_dtype = *dtype_of(*out);
}

}  // namespace mla
