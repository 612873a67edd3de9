// A whole decode call from a few numbers: random queries and cache, scattered pages, NaN in everything unused, poisoned
// results with guards behind them.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/capability.h"
#include "kernels/decode/plan_rule.h"
#include "tests/native/cuda_oracle.h"

namespace mla::test {

// A kernel that is compiled in and that this device runs: one capability row of mla_decode.
struct Variant {
  std::string name;
  int32_t number;  // DecodeParams::variant
  DType q_dtype;
  DType cache_dtype;
  std::vector<int32_t> tile_rows;
  std::vector<Range> page_sizes;  // empty: any
  bool largest_if_several;

  // "bf16", "bf16/e4m3fn": of the queries, and of the cache where that differs.
  std::string dtypes() const {
    return short_name(q_dtype) + (q_dtype == cache_dtype ? "" : std::string("/") + short_name(cache_dtype));
  }
  bool fp8() const { return cache_dtype == DType::kE4M3FN; }
  // Where nothing says otherwise, results have the dtype of the queries.
  DType out_dtype() const { return q_dtype == DType::kE4M3FN ? DType::kBF16 : q_dtype; }

  bool takes_pages_of(int32_t page_size) const {
    return page_sizes.empty() || std::any_of(page_sizes.begin(), page_sizes.end(),
                                             [&](const Range& range) { return contains(range, page_size); });
  }
};

// Of mla_decode, the best first.
inline const std::vector<Variant>& decode_variants() {
  static const std::vector<Variant> kVariants = [] {
    int32_t major = 0, minor = 0;
    check(device_attribute(&major, cudaDevAttrComputeCapabilityMajor, device()));
    check(device_attribute(&minor, cudaDevAttrComputeCapabilityMinor, device()));
    const std::vector<const char*> names = variants();
    std::vector<Variant> all;
    for (const Capability& row : capabilities()) {
      const std::string architecture = row.architecture;
      const bool runs = architecture.back() == '+' || architecture == "sm_" + std::to_string(major * 10 + minor);
      // dense_ds_mla_group has its own arrays for that layout.
      if (row.operation != std::string("mla_decode") || !runs || row.cache_dtype == std::string("fp8_ds_mla")) continue;
      const auto position =
          std::find_if(names.begin(), names.end(), [&](const char* name) { return row.variant == std::string(name); });
      require(position != names.end(), std::string("variants() lacks ") + row.variant);
      all.push_back({row.variant, static_cast<int32_t>(position - names.begin()) + 1, dtype_named(row.q_dtype),
                     dtype_named(row.cache_dtype), row.tile_rows, row.page_sizes, row.largest_if_several});
    }
    return all;
  }();
  return kVariants;
}

// Whether "NAME", "NAME,DTYPES" or nothing means this one.
inline bool selected(const Variant& variant, const std::string& only) {
  return only.empty() || only == variant.name || only == variant.name + "," + variant.dtypes();
}

// What every GPU runs, over a bf16 cache.
inline const Variant& generic_variant() {
  for (const Variant& variant : decode_variants()) {
    if (variant.name == "generic" && variant.dtypes() == "bf16") return variant;
  }
  require(false, "the generic kernel has no row for bf16");
  return decode_variants().front();
}

// Relative error of a row of out that is allowed, by the coarsest rounding on the way.
inline double tolerance_of(const Variant& variant) {
  if (variant.q_dtype == DType::kE4M3FN) return 4e-2;
  return variant.cache_dtype == DType::kF16 ? 2e-3 : 1e-2;
}

struct DecodeShapes {
  int32_t heads = 16;
  int32_t max_q_len = 1;
  int32_t page_size = 64;
  std::vector<int32_t> kv_lens = {200, 0, 77};
  std::vector<int32_t> q_lens;  // empty: max_q_len each
  int32_t unowned_tokens = 0;   // behind the last request's
  int32_t max_pages = 0;        // 0: what the longest request needs, and one more
  bool causal = true;
  bool pair = false;       // latent and rope queries apart
  bool bad_pages = false;  // some entries of the page table lead nowhere
  bool batch_invariant = false;
  int32_t layers = 1;
  int32_t layer = 0;
  int32_t skipped_pages = 0;  // unused ones in front of the used
  bool scaled = true;         // fp8: k_scale and, for fp8 queries, q_scale
  bool layer_scales = true;   // k_scale for each layer
  bool all_codes = false;     // fp8: every finite code of the cache equally often
  float query_magnitude = 1;
  int32_t nan_request = -1;  // a NaN in token nan_token of this request
  int32_t nan_token = 0;
  const Variant* variant = &generic_variant();  // and so the dtypes
  int32_t tile_rows = 0;                        // 0: the rule of the wrapper
  float scale = 0.072168784f;                   // 192 ** -0.5
  uint64_t seed = 1;

  std::string text() const {
    std::string s = variant->name + ", " + variant->dtypes() + ", heads " + std::to_string(heads) + ", q " +
                    std::to_string(max_q_len) + ", page " + std::to_string(page_size) +
                    (causal ? ", causal" : ", full") + (pair ? ", pair" : "") +
                    (variant->fp8() && !scaled ? ", no scales" : "") + (batch_invariant ? ", batch invariant" : "") +
                    ", layer " + std::to_string(layer) + "/" + std::to_string(layers) + ", kv";
    for (size_t b = 0; b < kv_lens.size() && b < 8; ++b) s += " " + std::to_string(kv_lens[b]);
    if (!q_lens.empty()) s += ", ragged q";
    for (size_t b = 0; b < q_lens.size() && b < 8; ++b) s += " " + std::to_string(q_lens[b]);
    return s + ", seed " + std::to_string(seed);
  }
};

// As few tiles as the largest allows, and for these the smallest, or the largest.
inline int32_t choose_tile_rows(const Variant& variant, int64_t rows) {
  const int64_t tiles = (rows + variant.tile_rows.back() - 1) / variant.tile_rows.back();
  if (tiles > 1 && variant.largest_if_several) return variant.tile_rows.back();
  for (int32_t candidate : variant.tile_rows) {
    if (rows <= candidate * tiles) return candidate;
  }
  return variant.tile_rows.back();
}

inline int32_t device_parts() {
  static const int32_t kParts = [] {
    int32_t count = 0;
    check(device_attribute(&count, cudaDevAttrMultiProcessorCount, device()));
    return count * parts_per_unit();
  }();
  return kParts;
}

// The device arrays of a plan.
struct PlanArrays {
  Array<WorkItem> items;
  Array<int32_t> part_offsets;
  Array<TileSplits> tile_splits;
  DecodePlan plan{};

  PlanArrays() = default;
  PlanArrays(int64_t batch, int32_t row_tiles, int32_t tile_rows, int32_t parts, bool batch_invariant)
      : items(max_items(batch * row_tiles, parts, batch_invariant)),
        part_offsets(parts + 1),
        tile_splits(batch * row_tiles) {
    plan = {items.data(),
            part_offsets.data(),
            tile_splits.data(),
            parts,
            static_cast<int32_t>(items.size()),
            static_cast<int32_t>(max_partials(batch * row_tiles, parts, batch_invariant)),
            row_tiles,
            tile_rows};
  }
};

// Of the e4m3fn codes, for 0 <= i: all that are finite.
__host__ __device__ inline uint8_t finite_code(uint32_t i) {
  return static_cast<uint8_t>(i % 127 | (i / 127 & 1) << 7);
}

template <class Element>
__global__ void write_tokens_kernel(Element* layer, const int32_t* slots, int64_t tokens, uint64_t seed,
                                    bool all_codes) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= tokens * kWidth) return;
  Element& target = layer[int64_t{slots[i / kWidth]} * kWidth + i % kWidth];
  target = from_float<Element>(noise(seed, i));
  if constexpr (std::is_same_v<Element, E4M3FN>) {
    if (all_codes) target = {finite_code(mix(seed + i) >> 4)};
  }
}

class DecodeCase {
 public:
  static constexpr int64_t kGuardRows = 64;

  explicit DecodeCase(const DecodeShapes& shapes) : shapes_(shapes), random_(static_cast<uint32_t>(shapes.seed)) {
    const auto batch = static_cast<int32_t>(shapes.kv_lens.size());
    std::vector<int32_t> cu_q_lens(batch + 1, 0);
    for (int32_t b = 0; b < batch; ++b) {
      cu_q_lens[b + 1] = cu_q_lens[b] + (shapes.q_lens.empty() ? shapes.max_q_len : shapes.q_lens[b]);
    }
    const int32_t tokens = cu_q_lens[batch] + shapes.unowned_tokens;
    p_.q_dtype = shapes.variant->q_dtype;
    p_.cache_dtype = shapes.variant->cache_dtype;
    p_.out_dtype = shapes.variant->out_dtype();
    make_cache(batch);
    make_queries(tokens);
    kv_lens_ = Array<int32_t>(shapes.kv_lens);
    cu_q_lens_ = Array<int32_t>(cu_q_lens);
    layer_ = Array<int32_t>(std::vector<int32_t>{shapes.layer});
    rows_ = int64_t{tokens} * shapes.heads;
    out_ = Array<uint8_t>((rows_ + kGuardRows) * kLatent * size_of(p_.out_dtype));
    lse_ = Array<float>(rows_ + kGuardRows);

    p_.cache = cache_.data();
    p_.layer = shapes.layers > 1 || shapes.layer != 0 ? layer_.data() : nullptr;
    p_.page_table = page_table_.data();
    p_.kv_lens = kv_lens_.data();
    p_.cu_q_lens = shapes.q_lens.empty() ? nullptr : cu_q_lens_.data();
    p_.out = out_.data();
    p_.lse = lse_.data();
    p_.layers = shapes.layers;
    p_.page_size = shapes.page_size;
    p_.batch = batch;
    p_.tokens = tokens;
    p_.heads = shapes.heads;
    p_.max_q_len = shapes.max_q_len;
    p_.scale = shapes.scale;
    p_.causal = shapes.causal;
    make_scales();
    use(*shapes.variant, shapes.tile_rows);
  }

  // The same call by another variant of these dtypes. tile_rows 0: by the rule of the wrapper.
  void use(const Variant& variant, int32_t tile_rows = 0) {
    const int64_t request_rows = int64_t{p_.max_q_len} * p_.heads;
    if (tile_rows == 0) tile_rows = choose_tile_rows(variant, request_rows);
    const auto row_tiles = static_cast<int32_t>((request_rows + tile_rows - 1) / tile_rows);
    plan_ = PlanArrays(p_.batch, row_tiles, tile_rows, device_parts(), shapes_.batch_invariant);
    partial_out_ = Array<float>(int64_t{plan_.plan.max_partials} * tile_rows * kLatent);
    partial_lse_ = Array<float>(int64_t{plan_.plan.max_partials} * tile_rows);
    shapes_.variant = &variant;
    p_.variant = variant.number;
    p_.plan = plan_.plan;
    p_.partial_out = partial_out_.data();
    p_.partial_lse = partial_lse_.data();
  }

  PlanDecodeParams plan_params() const {
    PlanDecodeParams params{};
    params.kv_lens = p_.kv_lens;
    params.cu_q_lens = p_.cu_q_lens;
    params.plan = p_.plan;
    params.batch = p_.batch;
    params.heads = p_.heads;
    params.max_q_len = p_.max_q_len;
    params.overhead_blocks = 4;
    params.min_part_blocks = 2;
    params.few_pieces = 64;
    params.slack = 16;
    params.batch_invariant = shapes_.batch_invariant;
    return params;
  }

  void make_plan() { check(plan_decode(plan_params(), device())); }

  void poison() {
    out_.poison();
    lse_.poison();
    partial_out_.poison();
    partial_lse_.poison();
  }

  void run() {
    poison();
    make_plan();
    check(decode(p_, device()));
  }

  // Fails where the results are wrong or something behind them was written.
  Errors verify() {
    const Errors errors = compare_with_oracle(p_);
    require(errors.out <= tolerance_of(*shapes_.variant) && errors.lse <= 1e-3,
            shapes_.text() + ": row " + std::to_string(errors.worst_row) + ", error of out " +
                std::to_string(errors.out) + ", of lse " + std::to_string(errors.lse));
    require(untouched(out_.data() + rows_ * out_row_bytes(), kGuardRows * out_row_bytes()),
            shapes_.text() + ": out was written past its end");
    require(untouched(lse_.data() + rows_, kGuardRows * sizeof(float)),
            shapes_.text() + ": lse was written past its end");
    return errors;
  }

  const DecodeShapes& shapes() const { return shapes_; }
  DecodeParams& params() { return p_; }
  PlanArrays& plan() { return plan_; }
  Random& random() { return random_; }
  std::vector<uint8_t> out() const { return out_.download(); }
  std::vector<float> lse() const { return lse_.download(); }
  Array<int32_t>& kv_lens() { return kv_lens_; }
  int64_t out_row_bytes() const { return kLatent * size_of(p_.out_dtype); }

 private:
  static bool untouched(const void* data, int64_t bytes) {
    std::vector<uint8_t> guard(bytes);
    check(cudaMemcpyAsync(guard.data(), data, guard.size(), cudaMemcpyDeviceToHost, stream_of(device())));
    synchronize();
    return std::all_of(guard.begin(), guard.end(), [](uint8_t byte) { return byte == 0xFF; });
  }

  void make_cache(int32_t batch) {
    const int32_t page = shapes_.page_size;
    int32_t longest = 0;
    for (int32_t kv_len : shapes_.kv_lens) longest = std::max(longest, kv_len);
    const int32_t max_pages = shapes_.max_pages ? shapes_.max_pages : longest / page + 1;
    const int64_t pages = shapes_.skipped_pages + int64_t{batch} * max_pages + 3;
    std::vector<int32_t> order(pages - shapes_.skipped_pages);
    std::iota(order.begin(), order.end(), shapes_.skipped_pages);
    std::shuffle(order.begin(), order.end(), random_);

    // Table entries past a request's end hold anything; the pages' unused tokens stay NaN.
    const int32_t garbage[] = {-1, static_cast<int32_t>(pages), 0x7FFFFFFF, -0x7FFFFFFF, 0};
    std::vector<int32_t> table(int64_t{batch} * max_pages), slots;
    int64_t nan_slot = -1;
    for (int32_t b = 0; b < batch; ++b) {
      for (int32_t i = 0; i < max_pages; ++i) {
        int32_t& entry = table[int64_t{b} * max_pages + i];
        entry = order[int64_t{b} * max_pages + i];
        const int64_t used = std::min<int64_t>(std::max(shapes_.kv_lens[b], 0) - int64_t{i} * page, page);
        if (used <= 0 || (shapes_.bad_pages && pick(random_, 0, 2) == 0)) {
          entry = garbage[pick(random_, 0, used <= 0 ? 4 : 3)];
          continue;
        }
        for (int32_t t = 0; t < used; ++t) slots.push_back(entry * page + t);
        if (b == shapes_.nan_request && i == shapes_.nan_token / page) {
          nan_slot = int64_t{entry} * page + shapes_.nan_token % page;
        }
      }
    }
    page_table_ = Array<int32_t>(table);
    const int64_t layer_elements = pages * page * kWidth, element_bytes = size_of(p_.cache_dtype);
    cache_ = Array<uint8_t>(layer_elements * shapes_.layers * element_bytes);
    p_.pages = pages;
    p_.max_pages = max_pages;
    const bool known = shapes_.layer >= 0 && shapes_.layer < shapes_.layers;
    if (!known || slots.empty()) return;
    const Array<int32_t> device_slots(slots);
    const auto count = static_cast<int64_t>(slots.size());
    uint8_t* layer = cache_.data() + layer_elements * shapes_.layer * element_bytes;
    with_element(p_.cache_dtype, [&](auto element) {
      using Element = decltype(element);
      check(launch("the cache's tokens", write_tokens_kernel<Element>, grid_of(count * kWidth), device(),
                   reinterpret_cast<Element*>(layer), device_slots.data(), count, shapes_.seed, shapes_.all_codes));
    });
    if (nan_slot >= 0) {
      const int64_t column = shapes_.nan_token % kLatent;
      check(cudaMemsetAsync(layer + (nan_slot * kWidth + column) * element_bytes, 0xFF, element_bytes,
                            stream_of(device())));
    }
    synchronize();
  }

  void make_queries(int32_t tokens) {
    const int64_t rows = int64_t{tokens} * shapes_.heads, element_bytes = size_of(p_.q_dtype);
    q_ = Array<uint8_t>(rows * kWidth * element_bytes);
    with_element(p_.q_dtype, [&](auto element) {
      fill(reinterpret_cast<decltype(element)*>(q_.data()), rows * kWidth, shapes_.seed + 1000,
           shapes_.query_magnitude);
    });
    p_.q_latent = q_.data();
    p_.q_latent_stride = shapes_.pair ? kLatent : kWidth;
    p_.q_rope = q_.data() + (shapes_.pair ? rows * kLatent : kLatent) * element_bytes;
    p_.q_rope_stride = shapes_.pair ? kRope : kWidth;
  }

  // Of e4m3fn the codes reach 448, so all of them together want a small scale.
  void make_scales() {
    if (!shapes_.variant->fp8() || !shapes_.scaled) return;
    std::vector<float> scales;
    for (int32_t i = 0; i < (shapes_.layer_scales ? shapes_.layers : 1); ++i) {
      scales.push_back((shapes_.all_codes ? 0x1p-6f : 1.0f) * (0.7f + 0.4f * static_cast<float>(i)));
    }
    k_scale_ = Array<float>(scales);
    p_.k_scale = k_scale_.data();
    p_.k_scales = static_cast<int32_t>(scales.size());
    if (p_.q_dtype != DType::kE4M3FN) return;
    q_scale_ = Array<float>(std::vector<float>{1.3f});
    p_.q_scale = q_scale_.data();
  }

  DecodeShapes shapes_;
  Random random_;
  int64_t rows_ = 0;
  Array<uint8_t> q_, cache_, out_;  // of their dtypes
  Array<int32_t> page_table_, kv_lens_, cu_q_lens_, layer_;
  Array<float> lse_, partial_out_, partial_lse_, q_scale_, k_scale_;
  PlanArrays plan_;
  DecodeParams p_{};
};

}  // namespace mla::test
