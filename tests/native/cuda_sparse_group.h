// Tests and times of mla_sparse_decode on CUDA: random data, poisoned results, NaN in every token that nobody chose.
#pragma once

#include <algorithm>
#include <cmath>

#include "tests/native/cuda_host_dtypes.h"
#include "tests/native/cuda_timing.h"

namespace mla::test {

// A kernel of mla_sparse_decode and what it reads.
struct SparseCell {
  std::string name;
  int32_t number;  // SparseDecodeParams::variant
  DType q_dtype, cache_dtype;
  bool ds_mla;
  std::vector<int32_t> tile_rows;

  std::string dtypes() const {
    return std::string(short_name(q_dtype)) + "/" + (ds_mla ? "ds_mla" : short_name(cache_dtype));
  }
  std::string text() const { return name + " " + dtypes(); }
  int64_t token_bytes() const { return ds_mla ? kDsMlaBytes : kWidth * size_of(cache_dtype); }

  // As few tiles as the largest allows, and for these the smallest.
  int32_t rows_for(int32_t heads) const {
    const int32_t tiles = (heads + tile_rows.back() - 1) / tile_rows.back();
    return *std::find_if(tile_rows.begin(), tile_rows.end(), [&](int32_t rows) { return heads <= rows * tiles; });
  }
};

// Those that `only` names ("sparse": all; "sparse:NAME", "sparse:NAME,DTYPES") and this device runs.
inline std::vector<SparseCell> sparse_cells(const std::string& only) {
  int32_t major = 0, minor = 0;
  check(device_attribute(&major, cudaDevAttrComputeCapabilityMajor, device()));
  check(device_attribute(&minor, cudaDevAttrComputeCapabilityMinor, device()));
  const std::vector<const char*> names = variants();
  std::vector<SparseCell> cells;
  for (const Capability& row : capabilities()) {
    const std::string architecture = row.architecture;
    const bool runs = architecture.back() == '+' || architecture == "sm_" + std::to_string(major * 10 + minor);
    if (row.operation != std::string("mla_sparse_decode") || !runs) continue;
    const auto position =
        std::find_if(names.begin(), names.end(), [&](const char* name) { return row.variant == std::string(name); });
    require(position != names.end(), std::string("variants() lacks ") + row.variant);
    const bool ds_mla = row.cache_dtype == std::string("fp8_ds_mla");
    const SparseCell cell{row.variant,
                          static_cast<int32_t>(position - names.begin()) + 1,
                          dtype_named(row.q_dtype),
                          ds_mla ? DType::kE4M3FN : dtype_named(row.cache_dtype),
                          ds_mla,
                          row.tile_rows};
    const std::string name = "sparse:" + cell.name;
    if (only == "sparse" || only == name || only == name + "," + cell.dtypes()) cells.push_back(cell);
  }
  return cells;
}

struct SparseSizes {
  int32_t tokens = 2, heads = 24, topk = 100, slots = 400, splits = 1, layers = 1, layer = 0;
  enum Indices { kMasked, kWhole, kNothing, kDuplicates, kOne } indices = kMasked;
  bool pair = false, sink = false, lens = false;
};

class SparseProblem {
 public:
  SparseCell cell;
  SparseSizes sizes;

  SparseProblem(const SparseCell& cell, const SparseSizes& sizes, Random& random) : cell(cell), sizes(sizes) {
    make_queries(random);
    make_cache(random);
    make_indices(random);
    for (int32_t h = 0; h < sizes.heads; ++h)
      sink_.push_back(h % 5 == 0 ? -INFINITY : 0.7f * static_cast<float>(h % 9));
    upload();
  }

  SparseDecodeParams params() const {
    const SparseSizes& s = sizes;
    const bool scaled = cell.cache_dtype == DType::kE4M3FN && !cell.ds_mla;
    SparseDecodeParams p{};
    p.q_latent = q_.data();
    p.q_latent_stride = s.pair ? kLatent : kWidth;
    p.q_rope = s.pair ? rope_.data() : q_.data() + kLatent * size_of(cell.q_dtype);
    p.q_rope_stride = s.pair ? kRope : kWidth;
    p.cache = cache_.data();
    p.layer = s.layers == 1 && s.layer == 0 ? nullptr : layer_.data();
    p.indices = indices_on_device_.data();
    p.topk_lens = s.lens ? lens_on_device_.data() : nullptr;
    p.sink = s.sink ? sink_on_device_.data() : nullptr;
    p.q_scale = cell.q_dtype == DType::kE4M3FN ? scales_.data() : nullptr;
    p.k_scale = scaled ? scales_.data() + 1 : nullptr;
    p.out = out_.data();
    p.lse = lse_.data();
    p.partial_out = partial_out_.data();
    p.partial_lse = partial_lse_.data();
    p.slots = s.slots;
    p.layers = s.layers;
    p.tokens = s.tokens;
    p.heads = s.heads;
    p.topk = s.topk;
    p.splits = s.splits;
    p.tile_rows = cell.rows_for(s.heads);
    p.variant = cell.number;
    p.k_scales = scaled ? 1 : 0;
    p.scale = kScale;
    p.ds_mla = cell.ds_mla;
    p.q_dtype = cell.q_dtype;
    p.cache_dtype = cell.cache_dtype;
    p.out_dtype = out_dtype();
    return p;
  }

  void run() {
    poison();
    check(sparse_decode(params(), device()));
  }

  void poison() {
    out_.poison();
    lse_.poison();
    partial_out_.poison();
    partial_lse_.poison();
  }

  Bytes out() const { return out_.download(); }
  std::vector<float> lse() const { return lse_.download(); }

  std::string text() const {
    const SparseSizes& s = sizes;
    return cell.text() + ", " + std::to_string(s.tokens) + " x " + std::to_string(s.heads) + " heads, top-k " +
           std::to_string(s.topk) + ", " + std::to_string(s.splits) + " splits, layer " + std::to_string(s.layer) +
           " of " + std::to_string(s.layers) + ", indices " + std::to_string(s.indices);
  }

  // The relative error of the whole of out.
  double compare() const {
    const Bytes out = this->out();
    const std::vector<float> lse = this->lse();
    double error = 0, norm = 0;
    for (int32_t t = 0; t < sizes.tokens; ++t) {
      const std::vector<int32_t> chosen = chosen_by(t);
      for (int32_t h = 0; h < sizes.heads; ++h) {
        const int64_t row = int64_t{t} * sizes.heads + h;
        compare_row(row, chosen, out.data() + row * kLatent * size_of(out_dtype()), lse[row], &error, &norm);
      }
    }
    const double relative = norm > 0 ? std::sqrt(error / norm) : 0;
    require(relative <= (out_dtype() == DType::kF16 ? 3e-3 : 1e-2),
            "out differs by " + std::to_string(relative) + ": " + text());
    return relative;
  }

 private:
  static constexpr float kScale = 0.07216878f, kQScale = 1.3f, kKScale = 0.6f;

  DType out_dtype() const { return cell.q_dtype == DType::kE4M3FN ? DType::kBF16 : cell.q_dtype; }

  static float normal(Random& random) { return static_cast<float>(std::normal_distribution<double>()(random)); }

  void make_queries(Random& random) {
    const int64_t size = size_of(cell.q_dtype), rows = int64_t{sizes.tokens} * sizes.heads;
    queries_.resize(rows * kWidth);
    host_q_.resize(rows * (sizes.pair ? kLatent : kWidth) * size);
    host_rope_.resize(rows * kRope * size);
    for (int64_t row = 0; row < rows; ++row) {
      for (int c = 0; c < kWidth; ++c) {
        const bool apart = sizes.pair && c >= kLatent;
        uint8_t* const target = apart ? host_rope_.data() + (row * kRope + c - kLatent) * size
                                      : host_q_.data() + (row * (sizes.pair ? kLatent : kWidth) + c) * size;
        set_value(cell.q_dtype, target, normal(random));
        queries_[row * kWidth + c] = value_at(cell.q_dtype, target) * (cell.q_dtype == DType::kE4M3FN ? kQScale : 1);
      }
    }
  }

  bool has_layer() const { return sizes.layer >= 0 && sizes.layer < sizes.layers; }

  // Every third slot, and every other layer, stays NaN: bytes of 0xFF.
  void make_cache(Random& random) {
    host_cache_.assign(int64_t{sizes.layers} * sizes.slots * cell.token_bytes(), 0xFF);
    keys_.assign(int64_t{sizes.slots} * kWidth, NAN);
    for (int32_t slot = 0; slot < sizes.slots && has_layer(); ++slot) {
      if (slot % 3 == 0) continue;
      uint8_t* const token = host_cache_.data() + (int64_t{sizes.layer} * sizes.slots + slot) * cell.token_bytes();
      for (int c = 0; c < kWidth; ++c) keys_[int64_t{slot} * kWidth + c] = make_key(token, c, slot, random);
    }
  }

  float make_key(uint8_t* token, int c, int32_t slot, Random& random) const {
    const float x = normal(random);
    if (!cell.ds_mla) {
      uint8_t* const target = token + c * size_of(cell.cache_dtype);
      set_value(cell.cache_dtype, target, x);
      return value_at(cell.cache_dtype, target) * (cell.cache_dtype == DType::kE4M3FN ? kKScale : 1);
    }
    if (c >= kLatent) {
      uint8_t* const target = token + kDsMlaBytes - kRope * 2 + (c - kLatent) * 2;
      set_value(DType::kBF16, target, x);
      return value_at(DType::kBF16, target);
    }
    const float scale = 0.013f * static_cast<float>(1 + (slot + c / kDsMlaGroup) % 7);
    std::memcpy(token + kLatent + c / kDsMlaGroup * 4, &scale, sizeof(scale));
    set_value(DType::kE4M3FN, token + c, x / scale);
    return value_at(DType::kE4M3FN, token + c) * scale;
  }

  void make_indices(Random& random) {
    const auto token = [&] { return pick(random, 0, (sizes.slots - 3) / 3) * 3 + pick(random, 1, 2); };
    const int32_t bad[] = {-1, -7, INT32_MIN, sizes.slots, sizes.slots + 5, INT32_MAX};
    const int32_t lens[] = {INT32_MIN, 0, 1, sizes.topk / 2, sizes.topk, INT32_MAX};
    for (int32_t t = 0; t < sizes.tokens; ++t) {
      const int32_t repeated = token(), only = pick(random, 0, sizes.topk - 1);
      for (int32_t i = 0; i < sizes.topk; ++i) {
        const bool masked = sizes.indices == SparseSizes::kNothing ||
                            (sizes.indices == SparseSizes::kMasked && pick(random, 0, 2) == 0) ||
                            (sizes.indices == SparseSizes::kOne && i != only);
        const bool same = sizes.indices == SparseSizes::kDuplicates && pick(random, 0, 1) == 0;
        indices_.push_back(masked ? bad[pick(random, 0, 5)] : same ? repeated : token());
      }
      lens_.push_back(lens[pick(random, 0, 5)]);
    }
  }

  void upload() {
    const int64_t rows = int64_t{sizes.tokens} * sizes.heads;
    q_ = Array<uint8_t>(host_q_);
    rope_ = Array<uint8_t>(host_rope_);
    cache_ = Array<uint8_t>(host_cache_);
    indices_on_device_ = Array<int32_t>(indices_);
    lens_on_device_ = Array<int32_t>(lens_);
    layer_ = Array<int32_t>(std::vector<int32_t>{sizes.layer});
    sink_on_device_ = Array<float>(sink_);
    scales_ = Array<float>(std::vector<float>{kQScale, kKScale});
    out_ = Array<uint8_t>(rows * kLatent * size_of(out_dtype()));
    lse_ = Array<float>(rows);
    const int64_t partials = sizes.splits == 1 ? 0 : sizes.splits * rows;
    partial_out_ = Array<float>(partials * kLatent);
    partial_lse_ = Array<float>(partials);
  }

  std::vector<int32_t> chosen_by(int32_t t) const {
    std::vector<int32_t> chosen;
    const int32_t end = sizes.lens ? std::min(sizes.topk, lens_[t]) : sizes.topk;
    for (int32_t i = 0; i < end && has_layer(); ++i) {
      const int32_t slot = indices_[int64_t{t} * sizes.topk + i];
      if (slot >= 0 && slot < sizes.slots) chosen.push_back(slot);
    }
    return chosen;
  }

  void compare_row(int64_t row, const std::vector<int32_t>& chosen, const uint8_t* out, float lse, double* error,
                   double* norm) const {
    std::vector<double> scores, expected(kLatent, 0.0);
    double highest = -INFINITY, total = 0;
    for (int32_t slot : chosen) {
      double dot = 0;
      for (int c = 0; c < kWidth; ++c) dot += double{queries_[row * kWidth + c]} * keys_[int64_t{slot} * kWidth + c];
      scores.push_back(dot * kScale);
      highest = std::max(highest, scores.back());
    }
    for (size_t i = 0; i < chosen.size(); ++i) {
      const double weight = std::exp(scores[i] - highest);
      total += weight;
      for (int c = 0; c < kLatent; ++c) expected[c] += weight * keys_[int64_t{chosen[i]} * kWidth + c];
    }
    const std::string where = " in row " + std::to_string(row) + ": " + text();
    if (chosen.empty()) {
      require(lse == -INFINITY, "lse of an empty row is " + std::to_string(lse) + where);
    } else {
      require(std::fabs(lse - (highest + std::log(total))) <= 1e-3, "lse is " + std::to_string(lse) + where);
    }
    if (sizes.sink) total += std::exp(sink_[row % sizes.heads] - highest);
    for (int c = 0; c < kLatent; ++c) {
      const double wanted = chosen.empty() ? 0 : expected[c] / total;
      const double difference = value_at(out_dtype(), out + c * size_of(out_dtype())) - wanted;
      require(std::isfinite(difference) && (!chosen.empty() || difference == 0), "out is wrong" + where);
      *error += difference * difference;
      *norm += wanted * wanted;
    }
  }

  std::vector<float> queries_, keys_, sink_;
  std::vector<int32_t> indices_, lens_;
  Bytes host_q_, host_rope_, host_cache_;
  Array<uint8_t> q_, rope_, cache_, out_;
  Array<int32_t> indices_on_device_, lens_on_device_, layer_;
  Array<float> sink_on_device_, scales_, lse_, partial_out_, partial_lse_;
};

inline std::string sparse_group(const std::vector<SparseCell>& cells, bool quick) {
  Random random(31);
  double worst = 0;
  int cases = 0;
  for (const SparseCell& cell : cells) {
    for (int32_t topk : {1, 63, 64, 192, 2048}) {
      for (int32_t heads : {1, 16, 17, 24, 33, 64, 65, 128, 144}) {
        if (quick && (topk + heads) % 3 != 0) continue;
        SparseSizes s;
        s.topk = topk;
        s.heads = heads;
        s.tokens = topk == 2048 ? 1 : pick(random, 1, 3);
        s.splits = pick(random, 0, 1) == 0 ? 1 : pick(random, 2, 9);
        s.layers = pick(random, 1, 2);
        s.layer = pick(random, 0, s.layers - 1);
        s.pair = pick(random, 0, 1) == 1;
        s.sink = pick(random, 0, 1) == 1;
        s.lens = pick(random, 0, 1) == 1;
        s.indices = static_cast<SparseSizes::Indices>(pick(random, 0, 4));
        SparseProblem problem(cell, s, random);
        problem.run();
        worst = std::max(worst, problem.compare());
        ++cases;
      }
    }
  }
  return std::to_string(cases) + " cases, worst error " + std::to_string(worst);
}

// Layers out of range and nothing chosen: empty rows, whatever the number of splits.
inline std::string sparse_empty_group(const std::vector<SparseCell>& cells, bool) {
  Random random(32);
  for (const SparseCell& cell : cells) {
    for (int32_t layer : {-1, 2, INT32_MIN, INT32_MAX, 0}) {
      for (int32_t splits : {1, 2}) {
        SparseSizes s;
        s.layers = 2;
        s.layer = layer;
        s.splits = splits;
        s.indices = SparseSizes::kNothing;
        s.sink = true;
        SparseProblem problem(cell, s, random);
        problem.run();
        problem.compare();
      }
    }
  }
  return {};
}

inline std::string sparse_repeats_group(const std::vector<SparseCell>& cells, bool quick) {
  Random random(33);
  for (const SparseCell& cell : cells) {
    SparseSizes s;
    s.topk = 2048;
    s.splits = 8;
    s.slots = 3000;
    SparseProblem problem(cell, s, random);
    problem.run();
    const Bytes out = problem.out();
    const std::vector<float> lse = problem.lse();
    for (int i = 0; i < (quick ? 2 : 20); ++i) {
      problem.run();
      require(same_bits(out, problem.out()) && same_bits(lse, problem.lse()), "other bits: " + problem.text());
    }
  }
  return {};
}

// Variant 0 is the first that takes the call's tiles, whatever kernel they were chosen for.
inline std::string sparse_choice_group(const std::vector<SparseCell>& cells, bool) {
  Random random(37);
  int count = 0;
  const std::vector<SparseCell> all = sparse_cells("sparse");
  for (const SparseCell& cell : cells) {
    for (int32_t heads : {8, 16, 24, 40, 48, 64}) {
      SparseSizes s;
      s.heads = heads;
      SparseProblem problem(cell, s, random);
      const int32_t tile_rows = problem.params().tile_rows;
      const auto expected = std::find_if(all.begin(), all.end(), [&](const SparseCell& candidate) {
        return candidate.dtypes() == cell.dtypes() &&
               std::count(candidate.tile_rows.begin(), candidate.tile_rows.end(), tile_rows) != 0;
      });
      require(expected != all.end(), "no kernel takes " + problem.text());
      problem.poison();
      SparseDecodeParams p = problem.params();
      p.variant = expected->number;
      check(sparse_decode(p, device()));
      const Bytes out = problem.out();
      const std::vector<float> lse = problem.lse();
      problem.poison();
      p.variant = 0;
      check(sparse_decode(p, device()));
      problem.compare();
      require(same_bits(out, problem.out()) && same_bits(lse, problem.lse()),
              problem.text() + ": the choice was not " + expected->name);
      ++count;
    }
  }
  return std::to_string(count) + " choices";
}

// Every call is refused before anything is launched, and says why.
inline std::string sparse_refusals_group(const std::vector<SparseCell>& cells, bool) {
  Random random(38);
  int count = 0;
  for (const SparseCell& cell : cells) {
    const SparseProblem problem(cell, SparseSizes{}, random);
    const auto refused = [&](const std::string& words, auto change) {
      SparseDecodeParams p = problem.params();
      change(p);
      const Error error = sparse_decode(p, device());
      require(error.find(words) != Error::npos,
              problem.text() + ": expected an error with '" + words + "', got '" + error + "'");
      ++count;
    };
    using P = SparseDecodeParams;
    refused("variant is -1, this module has", [](P& p) { p.variant = -1; });
    refused("variant is 99, this module has", [](P& p) { p.variant = 99; });
    refused("over float32", [](P& p) {
      p.cache_dtype = DType::kF32;
      p.ds_mla = false;
    });
    refused("out is float32", [](P& p) { p.out_dtype = DType::kF32; });
    refused("0 splits", [](P& p) { p.splits = 0; });
    refused("tiles of 0 heads", [](P& p) { p.tile_rows = 0; });
    if (cell.q_dtype != DType::kE4M3FN) refused("belong to fp8 queries", [](P& p) { p.q_scale = p.lse; });
    if (cell.ds_mla || cell.cache_dtype != DType::kE4M3FN) {
      refused("per-tensor fp8 caches", [](P& p) { p.k_scale = p.lse; });
    }
    if (cell.name == "sm90") refused("this call has 12", [](P& p) { p.tile_rows = 12; });
    if (cell.name == "sm90" && cell.ds_mla) refused("this call has 48", [](P& p) { p.tile_rows = 48; });
  }
  return std::to_string(count) + " refused calls";
}

// mla_decode over fp8_ds_mla: pages of one token, and a token's indices as a request's page table. Ids outside the
// cache are masked there too.
inline std::string dense_ds_mla_group(bool quick) {
  Random random(36);
  double worst = 0;
  int cases = 0;
  const SparseCell cell{"generic", 1, DType::kBF16, DType::kE4M3FN, true, {16, 32, 64}};
  for (int32_t keys : {1, 63, 64, 200, 2048}) {
    for (int32_t heads : {1, 16, 24, 64, 128}) {
      if (quick && (keys + heads) % 3 != 0) continue;
      SparseSizes s;
      s.topk = keys;
      s.heads = heads;
      s.tokens = pick(random, 1, 4);
      s.layers = pick(random, 1, 2);
      s.layer = pick(random, 0, s.layers - 1);
      s.pair = pick(random, 0, 1) == 1;
      SparseProblem problem(cell, s, random);
      const SparseDecodeParams sparse = problem.params();
      const int32_t tile_rows = sparse.tile_rows, row_tiles = (heads + tile_rows - 1) / tile_rows;
      const Array<int32_t> kv_lens(std::vector<int32_t>(s.tokens, keys));
      const PlanArrays plan(s.tokens, row_tiles, tile_rows, device_parts(), /*batch_invariant=*/false);
      const Array<float> partial_out(int64_t{plan.plan.max_partials} * tile_rows * kLatent);
      const Array<float> partial_lse(int64_t{plan.plan.max_partials} * tile_rows);
      DecodeParams p{};
      p.q_latent = sparse.q_latent;
      p.q_rope = sparse.q_rope;
      p.q_latent_stride = sparse.q_latent_stride;
      p.q_rope_stride = sparse.q_rope_stride;
      p.cache = sparse.cache;
      p.layer = sparse.layer;
      p.page_table = sparse.indices;
      p.kv_lens = kv_lens.data();
      p.plan = plan.plan;
      p.out = sparse.out;
      p.lse = sparse.lse;
      p.partial_out = partial_out.data();
      p.partial_lse = partial_lse.data();
      p.pages = s.slots;
      p.layers = s.layers;
      p.page_size = 1;
      p.max_pages = keys;
      p.batch = p.tokens = s.tokens;
      p.heads = heads;
      p.max_q_len = 1;
      p.variant = cell.number;
      p.scale = sparse.scale;
      p.causal = true;
      p.ds_mla = true;
      p.q_dtype = p.out_dtype = DType::kBF16;
      p.cache_dtype = DType::kE4M3FN;
      PlanDecodeParams planning{};
      planning.kv_lens = p.kv_lens;
      planning.plan = p.plan;
      planning.batch = p.batch;
      planning.heads = heads;
      planning.max_q_len = 1;
      planning.overhead_blocks = 1;
      planning.min_part_blocks = 2;
      planning.slack = 16;
      problem.poison();
      check(plan_decode(planning, device()));
      check(decode(p, device()));
      worst = std::max(worst, problem.compare());
      ++cases;
    }
  }
  return std::to_string(cases) + " cases, worst error " + std::to_string(worst);
}

// Finite tokens for times: `count` of them, some thousands of random ones over and over.
inline Array<uint8_t> timed_cache(const SparseCell& cell, int64_t count) {
  constexpr int64_t kDifferent = 1 << 12;
  Random random(34);
  Bytes tokens(kDifferent * cell.token_bytes());
  for (uint8_t& byte : tokens) byte = static_cast<uint8_t>(random());
  for (int64_t t = 0; t < kDifferent; ++t) {
    uint8_t* const token = tokens.data() + t * cell.token_bytes();
    const int codes = cell.ds_mla ? kLatent : kWidth;
    for (int c = 0; c < codes; ++c) {
      const float x = static_cast<float>(pick(random, -1000, 1000)) * 1e-3f;
      if (cell.cache_dtype == DType::kE4M3FN) {
        token[c] = finite_code(random());
      } else {
        set_value(cell.cache_dtype, token + c * size_of(cell.cache_dtype), x);
      }
    }
    if (!cell.ds_mla) continue;
    for (int group = 0; group < kLatent / kDsMlaGroup; ++group) {
      const float scale = 0.002f * static_cast<float>(1 + group);
      std::memcpy(token + kLatent + group * 4, &scale, sizeof(scale));
    }
    for (int c = 0; c < kRope; ++c) {
      set_value(DType::kBF16, token + kDsMlaBytes - kRope * 2 + c * 2, static_cast<float>(pick(random, -9, 9)) * 0.1f);
    }
  }
  Array<uint8_t> cache(count * cell.token_bytes());
  for (int64_t first = 0; first < count; first += kDifferent) {
    const size_t bytes = std::min(kDifferent, count - first) * cell.token_bytes();
    check(cudaMemcpy(cache.data() + first * cell.token_bytes(), tokens.data(), bytes, cudaMemcpyHostToDevice));
  }
  return cache;
}

// Device time of the wrapper's choice of splits, by graph replays.
inline void time_sparse_call(const SparseCell& cell, const Array<uint8_t>& cache, int64_t slots, int32_t tokens,
                             int32_t heads) {
  constexpr int32_t kTopk = 2048;
  Random random(35);
  std::vector<int32_t> indices(int64_t{tokens} * kTopk);
  for (int32_t& slot : indices) slot = pick(random, 0, static_cast<int>(slots) - 1);
  const Array<int32_t> indices_on_device(indices);
  const int32_t rows = cell.rows_for(heads), tiles = (heads + rows - 1) / rows;
  const int32_t splits = std::max(1, std::min(device_parts() / (tokens * tiles), kTopk / 128));
  const int64_t all = int64_t{tokens} * heads, partials = splits == 1 ? 0 : splits * all;
  const Array<uint16_t> q(all * kWidth), out(all * kLatent);
  const Array<float> lse(all), partial_out(partials * kLatent), partial_lse(partials);
  fill(reinterpret_cast<__nv_bfloat16*>(q.data()), all * kWidth, 35);
  SparseDecodeParams p{};
  p.q_latent = q.data();
  p.q_rope = q.data() + kLatent;
  p.q_latent_stride = p.q_rope_stride = kWidth;
  p.cache = cache.data();
  p.indices = indices_on_device.data();
  p.out = out.data();
  p.lse = lse.data();
  p.partial_out = partial_out.data();
  p.partial_lse = partial_lse.data();
  p.slots = slots;
  p.layers = 1;
  p.tokens = tokens;
  p.heads = heads;
  p.topk = kTopk;
  p.splits = splits;
  p.tile_rows = rows;
  p.variant = cell.number;
  p.scale = 0.07f;
  p.ds_mla = cell.ds_mla;
  p.q_dtype = p.out_dtype = DType::kBF16;
  p.cache_dtype = cell.cache_dtype;
  const double us = time_calls(tokens > 1000 ? 2 : 10, [&](int) { check(sparse_decode(p, device())); });
  const double chosen = 1.0 * tokens * kTopk;
  std::printf("%4d queries x top-k %d, %3d heads, %-20s %2d splits %8.1f us %6.2f TB/s %7.1f TFLOP/s\n", tokens, kTopk,
              heads, cell.text().c_str(), splits, us, chosen * cell.token_bytes() / us * 1e-6,
              2 * chosen * heads * (kWidth + kLatent) / us * 1e-6);
  std::fflush(stdout);
}

// A decode step of 128 sequences with one and with two query tokens, a lone query, a prompt of 4096 tokens.
inline void time_sparse(const std::string& only) {
  constexpr int64_t kSlots = 1 << 19;
  for (const SparseCell& cell : sparse_cells(only)) {
    if (cell.q_dtype != DType::kBF16) continue;
    const Array<uint8_t> cache = timed_cache(cell, kSlots);
    for (int32_t tokens : {128, 256, 1, 4096}) {
      for (int32_t heads : {128, 64, 24, 16}) time_sparse_call(cell, cache, kSlots, tokens, heads);
    }
  }
}

}  // namespace mla::test
