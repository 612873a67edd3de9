// One decode problem: its arrays, the call, and the same in float64.
#pragma once

#include <algorithm>
#include <cstdio>

#include "kernels/decode/plan_rule.h"
#include "kernels/entry.h"
#include "tests/native/ds_mla.h"
#include "tests/native/support.h"

namespace mla::test {

struct DecodeShape {
  DType q_type = DType::kBF16, cache_type = DType::kBF16;
  bool ds_mla = false;  // cache_type is then kE4M3FN
  int heads = 24, page_size = 64, max_q_len = 1, tile_rows = 32, parts = 4, layers = 1, layer = 0, variant = 0;
  bool ragged = false, causal = true, pair = false, batch_invariant = false, scales = false;
  int extra_tokens = 0;      // query tokens that no request owns
  std::vector<int> kv_lens;  // as given to decode, in bounds or not
  std::vector<int> q_lens;   // ragged

  int batch() const { return static_cast<int>(kv_lens.size()); }

  std::string text() const {
    std::string lens;
    for (int b = 0; b < batch(); ++b)
      lens += " " + std::to_string(kv_lens[b]) + (ragged ? "/" + std::to_string(q_lens[b]) : "");
    char line[256];
    std::snprintf(line, sizeof(line),
                  "variant %d q %s cache %s heads %d page %d q_len %d rows %d parts %d layer %d/%d%s%s%s%s%s kv",
                  variant, name_of(q_type), ds_mla ? "ds_mla" : name_of(cache_type), heads, page_size, max_q_len,
                  tile_rows, parts, layer, layers, ragged ? " ragged" : "", causal ? " causal" : "",
                  pair ? " pair" : "", batch_invariant ? " invariant" : "", scales ? " scales" : "");
    return line + lens;
  }
};

class DecodeCase {
 public:
  DecodeShape shape;
  Array q, rope, cache, out;
  Buffer<int32_t> page_table, kv_lens, cu_q_lens, part_offsets;
  Buffer<float> lse, partial_out, partial_lse, k_scale;
  Buffer<WorkItem> items;
  Buffer<TileSplits> splits;
  Scalar<int32_t> layer{0};
  Scalar<float> q_scale{1.0f};
  int32_t tokens = 0, max_pages = 0, pages = 0, row_tiles = 0;
  float scale = 0.07216878f;

  DecodeCase(const DecodeShape& s, Random& random, int table_pages = 0) : shape(s) {
    const int batch = s.batch();
    for (int n : s.kv_lens) kv_lens.push_back(n);
    tokens = batch * s.max_q_len;
    if (s.ragged) {
      cu_q_lens.push_back(0);
      for (int n : s.q_lens) cu_q_lens.push_back(cu_q_lens.back() + n);
      tokens = cu_q_lens.back() + s.extra_tokens;
    }
    int longest = 1, needed = 0;
    for (int n : kv_lens) longest = std::max(longest, std::min(n, 100000));
    max_pages = table_pages > 0 ? table_pages : (longest + s.page_size - 1) / s.page_size + 1;
    const auto readable = [&](int n) { return std::clamp(n, 0, max_pages * s.page_size); };
    for (int n : kv_lens) needed += (readable(n) + s.page_size - 1) / s.page_size;
    pages = needed + 2;

    q = Array(s.q_type, int64_t{tokens} * s.heads * (s.pair ? kLatent : kWidth));
    q.fill_random(random, 0, q.count());
    if (s.pair) {
      rope = Array(s.q_type, int64_t{tokens} * s.heads * kRope);
      rope.fill_random(random, 0, rope.count());
    }
    cache = Array(s.cache_type, int64_t{s.layers} * pages * s.page_size * (s.ds_mla ? kDsMlaBytes : kWidth));
    if (!s.ds_mla) cache.fill_nan();
    layer = s.layer;
    for (int i = 0; i < s.layers; ++i) k_scale.push_back(s.scales ? 0.5f + 0.25f * i : 1.0f);
    if (s.scales) q_scale = 1.5f;

    // Pages in random order; the table's padding points at a page of NaN, or nowhere.
    std::vector<int> order(pages);
    for (int i = 0; i < pages; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    const int nan_page = order[pages - 1];
    int next = 0;
    for (int b = 0; b < batch; ++b) {
      const int length = readable(kv_lens[b]);
      for (int i = 0; i < max_pages; ++i) {
        const bool used = i * s.page_size < length;
        page_table.push_back(used ? order[next++] : choose(random, {nan_page, -1, pages, INT32_MAX, INT32_MIN}));
        if (!used || layer < 0 || layer >= s.layers) continue;
        const int64_t first = (int64_t{layer} * pages + page_table.back()) * s.page_size;
        const int64_t end = first + std::min(s.page_size, length - i * s.page_size);
        if (!s.ds_mla) cache.fill_random(random, first * kWidth, end * kWidth);
        for (int64_t token = first; token < end && s.ds_mla; ++token) fill_ds_mla(cache, random, token);
      }
    }
    out = Array(out_type(), int64_t{tokens} * s.heads * kLatent);
    lse.resize(int64_t{tokens} * s.heads);
    row_tiles = ceil_div(s.heads * s.max_q_len, s.tile_rows);
    const int64_t tiles = int64_t{batch} * row_tiles;
    items.resize(max_items(tiles, s.parts, s.batch_invariant));
    splits.resize(tiles);
    part_offsets.resize(s.parts + 1);
    const int64_t partials = max_partials(tiles, s.parts, s.batch_invariant);
    partial_out.resize(partials * s.tile_rows * kLatent);
    partial_lse.resize(partials * s.tile_rows);
  }

  DType out_type() const { return is_fp8(shape.q_type) ? DType::kBF16 : shape.q_type; }

  DecodePlan plan() {
    const auto partials = static_cast<int32_t>(partial_lse.size() / shape.tile_rows);
    return {items.data(), part_offsets.data(), splits.data(),  shape.parts, static_cast<int32_t>(items.size()),
            partials,     row_tiles,           shape.tile_rows};
  }

  PlanDecodeParams plan_params() {
    return {kv_lens.data(),
            shape.ragged ? cu_q_lens.data() : nullptr,
            plan(),
            shape.batch(),
            shape.heads,
            shape.max_q_len,
            /*overhead_blocks=*/1,
            /*min_part_blocks=*/1,
            /*few_pieces=*/0,
            /*slack=*/3,
            shape.batch_invariant};
  }

  Error make_plan(const Device& device) {
    std::memset(static_cast<void*>(items.data()), 0x5a, items.size() * sizeof(WorkItem));
    return plan_decode(plan_params(), device);
  }

  DecodeParams params() {
    const DecodeShape& s = shape;
    DecodeParams p{};
    p.q_latent = q.data();
    p.q_latent_stride = s.pair ? kLatent : kWidth;
    p.q_rope = s.pair ? rope.data() : q.bytes.data() + kLatent * size_of(s.q_type);
    p.q_rope_stride = s.pair ? kRope : kWidth;
    p.cache = cache.data();
    p.layer = s.layers == 1 && layer == 0 ? nullptr : layer.data();
    p.page_table = page_table.data();
    p.kv_lens = kv_lens.data();
    p.cu_q_lens = s.ragged ? cu_q_lens.data() : nullptr;
    p.q_scale = s.scales && is_fp8(s.q_type) ? q_scale.data() : nullptr;
    const bool fp8 = is_fp8(s.cache_type) && !s.ds_mla;
    p.k_scale = s.scales && fp8 ? k_scale.data() : nullptr;
    p.plan = plan();
    p.out = out.data();
    p.lse = lse.data();
    p.partial_out = partial_out.data();
    p.partial_lse = partial_lse.data();
    p.pages = pages;
    p.layers = s.layers;
    p.page_size = s.page_size;
    p.max_pages = max_pages;
    p.batch = s.batch();
    p.tokens = tokens;
    p.heads = s.heads;
    p.max_q_len = s.max_q_len;
    p.k_scales = s.scales && fp8 ? s.layers : 0;
    p.variant = s.variant;
    p.scale = scale;
    p.causal = s.causal;
    p.ds_mla = s.ds_mla;
    p.q_dtype = s.q_type;
    p.cache_dtype = s.cache_type;
    p.out_dtype = out_type();
    return p;
  }

  // Everything written is poisoned first.
  Error run(const Device& device) {
    out.fill_nan();
    std::fill(lse.begin(), lse.end(), kNaN);
    std::fill(partial_out.begin(), partial_out.end(), kNaN);
    std::fill(partial_lse.begin(), partial_lse.end(), kNaN);
    return decode(params(), device);
  }

  double query(int64_t row, int c) const {
    if (!shape.pair) return q.at(row * kWidth + c);
    return c < kLatent ? q.at(row * kLatent + c) : rope.at(row * kRope + c - kLatent);
  }

  // The request's token j, or -1 where it is masked.
  int64_t slot_of(int b, int64_t j) const {
    if (j >= int64_t{max_pages} * shape.page_size) return -1;
    const int page = page_table[b * max_pages + j / shape.page_size];
    return page < 0 || page >= pages ? -1 : int64_t{page} * shape.page_size + j % shape.page_size;
  }

  // Compares with float64; returns a description of the first disagreement, or nothing.
  std::string compare(double out_tolerance, double lse_tolerance, double* worst) const {
    const DecodeShape& s = shape;
    std::vector<bool> owned(tokens, false);
    const bool fp8 = is_fp8(s.cache_type) && !s.ds_mla;
    const bool has_layer = layer >= 0 && layer < s.layers;
    const double k_factor = fp8 && s.scales && has_layer ? k_scale[layer] : 1;
    const double q_factor = is_fp8(s.q_type) && s.scales ? float{q_scale} : 1.0f;
    double error = 0, norm = 0;
    for (int b = 0; b < s.batch(); ++b) {
      const int64_t first = s.ragged ? cu_q_lens[b] : b * s.max_q_len;
      const int64_t n = s.ragged ? cu_q_lens[b + 1] - cu_q_lens[b] : s.max_q_len;
      const int64_t kv_len = has_layer ? std::max(kv_lens[b], 0) : 0;
      const int64_t reach = std::min(kv_len, int64_t{max_pages} * s.page_size);
      std::vector<double> keys;
      std::vector<bool> masked;
      for (int64_t j = 0; j < reach; ++j) {
        const int64_t slot = slot_of(b, j);
        masked.push_back(slot < 0);
        const int64_t token = int64_t{layer} * pages * s.page_size + slot;
        for (int c = 0; c < kWidth; ++c) {
          keys.push_back(slot < 0   ? 0
                         : s.ds_mla ? ds_mla_at(cache, token, c)
                                    : k_factor * cache.at(token * kWidth + c));
        }
      }
      for (int64_t i = 0; i < std::min<int64_t>(n, s.max_q_len); ++i) {
        owned[first + i] = true;
        const int64_t visible = s.causal ? std::min(reach, kv_len - n + i + 1) : reach;
        for (int h = 0; h < s.heads; ++h) {
          const std::string wrong =
              compare_row((first + i) * s.heads + h, keys, masked, visible, q_factor, lse_tolerance, &error, &norm);
          if (!wrong.empty()) return wrong;
        }
      }
    }
    for (int64_t t = 0; t < tokens; ++t) {
      for (int h = 0; h < s.heads && !owned[t]; ++h) {
        const std::string wrong = compare_row(t * s.heads + h, {}, {}, 0, 1, lse_tolerance, &error, &norm);
        if (!wrong.empty()) return wrong;
      }
    }
    const double relative = norm > 0 ? std::sqrt(error / norm) : 0;
    *worst = std::max(*worst, relative);
    if (!(relative <= out_tolerance)) return "out differs by " + std::to_string(relative);
    return "";
  }

 private:
  std::string compare_row(int64_t row, const std::vector<double>& keys, const std::vector<bool>& masked,
                          int64_t visible, double q_factor, double lse_tolerance, double* error, double* norm) const {
    std::vector<double> scores;
    double query_row[kWidth], largest = -kInfinity, sum = 0;
    for (int c = 0; c < kWidth; ++c) query_row[c] = query(row, c);
    for (int64_t j = 0; j < visible; ++j) {
      double dot = -kInfinity;
      if (!masked[j]) {
        dot = 0;
        for (int c = 0; c < kWidth; ++c) dot += query_row[c] * keys[j * kWidth + c];
        dot *= scale * q_factor;
      }
      scores.push_back(dot);
      largest = std::max(largest, dot);
    }
    std::vector<double> expected(kLatent, 0.0);
    for (int64_t j = 0; j < visible; ++j) {
      if (scores[j] == -kInfinity) continue;
      const double p = std::exp(scores[j] - largest);
      sum += p;
      for (int c = 0; c < kLatent; ++c) expected[c] += p * keys[j * kWidth + c];
    }
    const std::string where = " in row " + std::to_string(row);
    if (sum == 0) {
      if (lse[row] != -kInfinity) return "lse of an empty row is " + std::to_string(lse[row]) + where;
      for (int c = 0; c < kLatent; ++c) {
        if (out.at(row * kLatent + c) != 0) return "out of an empty row is not 0" + where;
      }
      return "";
    }
    const double expected_lse = largest + std::log(sum);
    if (!(std::fabs(lse[row] - expected_lse) <= lse_tolerance)) {
      return "lse is " + std::to_string(lse[row]) + ", expected " + std::to_string(expected_lse) + where;
    }
    for (int c = 0; c < kLatent; ++c) {
      const double wanted = expected[c] / sum, difference = out.at(row * kLatent + c) - wanted;
      if (!std::isfinite(difference)) return "out is not finite" + where;
      *error += difference * difference;
      *norm += wanted * wanted;
    }
    return "";
  }
};

}  // namespace mla::test
