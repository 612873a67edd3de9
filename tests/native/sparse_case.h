// One problem of sparse decode on the host: its arrays, the call, and the same in float64.
#pragma once

#include <algorithm>
#include <cstdio>

#include "kernels/entry.h"
#include "tests/native/ds_mla.h"
#include "tests/native/support.h"

namespace mla::test {

enum class Choice { kRandom, kNothing, kDuplicates, kOne };

struct SparseShape {
  DType q_type = DType::kBF16, cache_type = DType::kBF16;
  bool ds_mla = false;
  int tokens = 3, heads = 24, topk = 100, slots = 300, splits = 1, tile_rows = 32, layers = 1, layer = 0, variant = 0;
  bool pair = false, scales = false, sink = false, lens = false, masks = true;
  bool uneven = false;  // scales of fp8_ds_mla far apart, and zero
  Choice choice = Choice::kRandom;

  std::string text() const {
    char line[256];
    std::snprintf(
        line, sizeof(line),
        "variant %d q %s cache %s tokens %d heads %d topk %d slots %d splits %d rows %d layer %d/%d%s%s%s%s%s", variant,
        test::name_of(q_type), ds_mla ? "ds_mla" : test::name_of(cache_type), tokens, heads, topk, slots, splits,
        tile_rows, layer, layers, pair ? " pair" : "", scales ? " scales" : "", sink ? " sink" : "",
        lens ? " lens" : "", masks ? " masks" : "");
    return line;
  }
};

class SparseCase {
 public:
  SparseShape shape;
  Array q, rope, cache, out;
  Buffer<int32_t> indices, topk_lens;
  Buffer<float> sink, lse, partial_out, partial_lse, k_scale;
  Scalar<int32_t> layer{0};
  Scalar<float> q_scale{1.0f};
  float scale = 0.07216878f;

  // Two thirds of the slots hold tokens; the others are poison, and no index names them.
  SparseCase(const SparseShape& s, Random& random) : shape(s) {
    q = Array(s.q_type, int64_t{s.tokens} * s.heads * (s.pair ? kLatent : kWidth));
    q.fill_random(random, 0, q.count());
    if (s.pair) {
      rope = Array(s.q_type, int64_t{s.tokens} * s.heads * kRope);
      rope.fill_random(random, 0, rope.count());
    }
    layer = s.layer;
    for (int i = 0; i < s.layers; ++i) k_scale.push_back(s.scales ? 0.5f + 0.25f * i : 1.0f);
    if (s.scales) q_scale = 1.5f;
    make_cache(random);
    make_indices(random);
    for (int h = 0; h < s.heads && s.sink; ++h) {
      sink.push_back(choose(random, {-kInfinity, -2.0f, 0.5f, 3.0f, 6.0f}));
    }
    out = Array(out_type(), int64_t{s.tokens} * s.heads * kLatent);
    lse.resize(int64_t{s.tokens} * s.heads);
    if (s.splits > 1) {
      partial_out.resize(s.splits * lse.size() * kLatent);
      partial_lse.resize(s.splits * lse.size());
    }
  }

  DType out_type() const { return is_fp8(shape.q_type) ? DType::kBF16 : shape.q_type; }

  SparseDecodeParams params() {
    const SparseShape& s = shape;
    const bool scaled = s.scales && is_fp8(s.cache_type) && !s.ds_mla;
    SparseDecodeParams p{};
    p.q_latent = q.data();
    p.q_latent_stride = s.pair ? kLatent : kWidth;
    p.q_rope = s.pair ? rope.data() : q.bytes.data() + kLatent * size_of(s.q_type);
    p.q_rope_stride = s.pair ? kRope : kWidth;
    p.cache = cache.data();
    p.layer = s.layers == 1 && layer == 0 ? nullptr : layer.data();
    p.indices = indices.data();
    p.topk_lens = s.lens ? topk_lens.data() : nullptr;
    p.sink = s.sink ? sink.data() : nullptr;
    p.q_scale = s.scales && is_fp8(s.q_type) ? q_scale.data() : nullptr;
    p.k_scale = scaled ? k_scale.data() : nullptr;
    p.out = out.data();
    p.lse = lse.data();
    p.partial_out = partial_out.data();
    p.partial_lse = partial_lse.data();
    p.slots = s.slots;
    p.layers = s.layers;
    p.tokens = s.tokens;
    p.heads = s.heads;
    p.topk = s.topk;
    p.splits = s.splits;
    p.tile_rows = s.tile_rows;
    p.k_scales = scaled ? s.layers : 0;
    p.variant = s.variant;
    p.scale = scale;
    p.ds_mla = s.ds_mla;
    p.q_dtype = s.q_type;
    p.cache_dtype = s.cache_type;
    p.out_dtype = out_type();
    return p;
  }

  void poison_results() {
    out.fill_nan();
    std::fill(lse.begin(), lse.end(), kNaN);
    std::fill(partial_out.begin(), partial_out.end(), kNaN);
    std::fill(partial_lse.begin(), partial_lse.end(), kNaN);
  }

  Error run(const Device& device) {
    poison_results();
    return sparse_decode(params(), device);
  }

  // Compares with float64; returns a description of the first disagreement, or nothing.
  std::string compare(double out_tolerance, double lse_tolerance, double* worst) const {
    double error = 0, norm = 0;
    for (int token = 0; token < shape.tokens; ++token) {
      const std::vector<double> keys = chosen_keys(token);
      for (int head = 0; head < shape.heads; ++head) {
        const std::string wrong = compare_row(int64_t{token} * shape.heads + head, keys, lse_tolerance, &error, &norm);
        if (!wrong.empty()) return wrong + " of token " + std::to_string(token) + ", head " + std::to_string(head);
      }
    }
    const double relative = norm > 0 ? std::sqrt(error / norm) : 0;
    *worst = std::max(*worst, relative);
    return relative <= out_tolerance ? "" : "out differs by " + std::to_string(relative);
  }

 private:
  void make_cache(Random& random) {
    const SparseShape& s = shape;
    const int64_t slots = int64_t{s.layers} * s.slots;
    cache = Array(s.cache_type, slots * (s.ds_mla ? kDsMlaBytes : kWidth));
    if (!s.ds_mla) cache.fill_nan();
    for (int i = 0; i < s.slots; ++i) {
      if (i % 3 == 0 || layer < 0 || layer >= s.layers) continue;
      const int64_t token = int64_t{layer} * s.slots + i;
      if (s.ds_mla) {
        fill_ds_mla(cache, random, token);
        if (s.uneven) spread_scales(token, random);
      } else {
        cache.fill_random(random, token * kWidth, (token + 1) * kWidth);
      }
    }
  }

  void spread_scales(int64_t token, Random& random) {
    const bool zero = pick(random, 0, 5) == 0;
    for (int group = 0; group < kLatent / kDsMlaGroup; ++group) {
      uint8_t* const place = cache.bytes.data() + token * kDsMlaBytes + kLatent + group * 4;
      float scale = 0;
      std::memcpy(&scale, place, sizeof(scale));
      scale = zero ? 0 : std::ldexp(scale, -pick(random, 0, 30));
      std::memcpy(place, &scale, sizeof(scale));
    }
  }

  void make_indices(Random& random) {
    const SparseShape& s = shape;
    const auto token = [&] { return pick(random, 0, (s.slots - 3) / 3) * 3 + pick(random, 1, 2); };
    const auto no_token = [&] { return choose(random, {-1, -5, INT32_MIN, s.slots, s.slots + 1, INT32_MAX}); };
    for (int t = 0; t < s.tokens; ++t) {
      const int repeated = token();
      const int kind = s.masks ? pick(random, 0, 3) : 0;  // none masked, some, most, all from somewhere on
      const int end = kind == 3 ? pick(random, 0, s.topk) : s.topk;
      const int only = s.choice == Choice::kOne ? pick(random, 0, s.topk - 1) : -1;
      for (int i = 0; i < s.topk; ++i) {
        bool masked = i >= end || (kind == 1 && pick(random, 0, 2) == 0) || (kind == 2 && pick(random, 0, 9) > 0);
        if (s.choice == Choice::kNothing || s.choice == Choice::kOne) masked = i != only;
        const bool same = s.choice == Choice::kDuplicates && pick(random, 0, 1) == 0;
        indices.push_back(masked ? no_token() : same ? repeated : token());
      }
      topk_lens.push_back(choose(random, {INT32_MIN, -1, 0, 1, s.topk / 2, s.topk - 1, s.topk, INT32_MAX}));
    }
  }

  // [n, D], dequantised.
  std::vector<double> chosen_keys(int token) const {
    const SparseShape& s = shape;
    std::vector<double> keys;
    if (layer < 0 || layer >= s.layers) return keys;
    const double factor = s.scales && is_fp8(s.cache_type) && !s.ds_mla ? k_scale[layer] : 1;
    for (int i = 0; i < std::min(s.topk, s.lens ? topk_lens[token] : s.topk); ++i) {
      const int64_t slot = indices[int64_t{token} * s.topk + i];
      if (slot < 0 || slot >= s.slots) continue;
      const int64_t row = int64_t{layer} * s.slots + slot;
      for (int c = 0; c < kWidth; ++c) {
        keys.push_back(s.ds_mla ? ds_mla_at(cache, row, c) : factor * cache.at(row * kWidth + c));
      }
    }
    return keys;
  }

  double query(int64_t row, int c) const {
    if (!shape.pair) return q.at(row * kWidth + c);
    return c < kLatent ? q.at(row * kLatent + c) : rope.at(row * kRope + c - kLatent);
  }

  std::string compare_row(int64_t row, const std::vector<double>& keys, double lse_tolerance, double* error,
                          double* norm) const {
    const auto count = static_cast<int64_t>(keys.size()) / kWidth;
    const double factor = scale * (is_fp8(shape.q_type) && shape.scales ? float{q_scale} : 1.0f);
    double query_row[kWidth], largest = -kInfinity, sum = 0;
    for (int c = 0; c < kWidth; ++c) query_row[c] = query(row, c);
    std::vector<double> scores, expected(kLatent, 0.0);
    for (int64_t j = 0; j < count; ++j) {
      double dot = 0;
      for (int c = 0; c < kWidth; ++c) dot += query_row[c] * keys[j * kWidth + c];
      scores.push_back(dot * factor);
      largest = std::max(largest, scores.back());
    }
    for (int64_t j = 0; j < count; ++j) {
      const double p = std::exp(scores[j] - largest);
      sum += p;
      for (int c = 0; c < kLatent; ++c) expected[c] += p * keys[j * kWidth + c];
    }
    const double expected_lse = count == 0 ? -kInfinity : largest + std::log(sum);
    if (count == 0 ? lse[row] != expected_lse : !(std::fabs(lse[row] - expected_lse) <= lse_tolerance)) {
      return "lse is " + std::to_string(lse[row]) + ", expected " + std::to_string(expected_lse);
    }
    if (shape.sink) sum += std::exp(sink[row % shape.heads] - largest);
    for (int c = 0; c < kLatent; ++c) {
      const double wanted = count == 0 ? 0 : expected[c] / sum, difference = out.at(row * kLatent + c) - wanted;
      if (!std::isfinite(difference) || (count == 0 && difference != 0)) return "out is wrong";
      *error += difference * difference;
      *norm += wanted * wanted;
    }
    return "";
  }
};

}  // namespace mla::test
