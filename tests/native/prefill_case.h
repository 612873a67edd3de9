// One prefill problem on the host: its arrays, the call, and the same in float64.
#pragma once

#include <algorithm>
#include <cstdio>

#include "kernels/entry.h"
#include "tests/native/key_parts.h"
#include "tests/native/support.h"

namespace mla::test {

struct PrefillShape {
  DType type = DType::kBF16;  // of queries and keys
  DType value_type = DType::kBF16;
  bool tiled = false;  // values lie as kValueTile says
  int heads = 2;
  bool causal = true, merge = false, key_mask = false, whole_values = false;
  int nope_width = 0, rope_width = 0;  // keys in parts: of an array of nope parts, and of rope keys
  std::vector<int> q_lens, kv_lens;
  int q_gap = 0, kv_gap = 0;  // tokens in front of the first request that none owns, and so many behind the last

  std::string text() const {
    std::string lens;
    for (size_t b = 0; b < q_lens.size(); ++b) {
      lens += " " + std::to_string(q_lens[b]) + "/" + std::to_string(kv_lens[b]);
    }
    const std::string types =
        std::string(test::name_of(type)) + " " + test::name_of(value_type) + (tiled ? " tiled" : "");
    char line[160];
    std::snprintf(line, sizeof(line), "%s heads %d gaps %d %d%s%s%s%s parts %d %d, queries/keys", types.c_str(), heads,
                  q_gap, kv_gap, causal ? " causal" : "", merge ? " merge" : "", key_mask ? " key_mask" : "",
                  whole_values ? " whole_values" : "", nope_width, rope_width);
    return line + lens;
  }
};

class PrefillCase {
 public:
  PrefillShape shape;
  Array q, k, v, out;
  Buffer<float> lse;
  Buffer<int32_t> cu_q_lens, cu_kv_lens;
  Buffer<uint32_t> key_mask;
  int32_t tokens = 0, stored = 0;
  float scale = 0.07216878f;
  Scalar<float> q_scale{1.0f}, k_scale{1.0f}, v_scale{1.0f};  // other than 1 for fp8 alone

  // Keys and values that nobody may see are NaN; so are, sometimes, values that only some queries see.
  PrefillCase(const PrefillShape& s, Random& random) : shape(s) {
    cu_q_lens.push_back(s.q_gap);
    cu_kv_lens.push_back(s.kv_gap);
    for (int n : s.q_lens) cu_q_lens.push_back(cu_q_lens.back() + n);
    for (int n : s.kv_lens) cu_kv_lens.push_back(cu_kv_lens.back() + n);
    tokens = cu_q_lens.back() + s.q_gap;
    stored = cu_kv_lens.back() + s.kv_gap;
    q = Array(s.type, int64_t{tokens} * s.heads * kHeadDim);
    k = Array(s.type, int64_t{stored} * s.heads * kHeadDim);
    v = Array(s.value_type, int64_t{stored} * s.heads * value_stride());
    q.fill_random(random, 0, q.count());
    k.fill_random(random, 0, k.count());
    v.fill_random(random, 0, v.count());
    if (in_parts()) share_rope(k, stored, s.heads);
    if (s.key_mask) {
      const bool often = pick(random, 0, 1) == 1;
      for (int i = 0; i < (stored + 31) / 32; ++i) {
        key_mask.push_back(often || pick(random, 0, 7) == 0 ? static_cast<uint32_t>(random()) : 0xFFFFFFFF);
      }
    }
    for (int64_t i = 0; i < q.count(); ++i) {
      const int64_t token = i / (int64_t{s.heads} * kHeadDim);
      if (token < cu_q_lens.front() || token >= cu_q_lens.back()) q.set_code(i, nan_code(s.type));
    }
    for (int32_t key = 0; key < stored; ++key) {
      const bool owned = key >= cu_kv_lens.front() && key < cu_kv_lens.back();
      if (!owned || masked(key)) spoil_key(key);
    }
  }

  DType result_type() const { return is_fp8(shape.type) ? DType::kBF16 : shape.type; }
  int64_t value_stride() const { return shape.whole_values ? 2 * kNope : kNope; }
  int64_t value_offset() const { return shape.whole_values ? kNope : 0; }
  bool in_parts() const { return shape.nope_width != 0; }
  bool masked(int32_t key) const { return shape.key_mask && !(key_mask[key / 32] >> key % 32 & 1); }

  void spoil_key(int32_t key) {
    for (int64_t i = 0; i < int64_t{shape.heads} * kHeadDim; ++i) {
      k.set_code(int64_t{key} * shape.heads * kHeadDim + i, nan_code(shape.type));
    }
    for (int h = 0; h < shape.heads; ++h) spoil_value(key, h, kNaN);
  }
  void spoil_value(int32_t key, int head, float with) {
    const int64_t row = value_offset() + (int64_t{key} * shape.heads + head) * value_stride();
    for (int c = 0; c < kNope; ++c) v.set(row + c, with);
  }

  // The state before the call: poisoned, or for merging a random one with rows that count as empty.
  void prepare(Random& random) {
    const int64_t rows = int64_t{tokens} * shape.heads;
    out = Array(shape.merge ? DType::kF32 : result_type(), rows * kNope);
    lse.assign(rows, kNaN);
    out.fill_nan();
    for (int64_t row = 0; row < rows && shape.merge; ++row) {
      const int kind = pick(random, 0, 5);
      lse[row] = kind == 0 ? -kInfinity : kind == 1 ? kInfinity : kind == 2 ? kNaN : 0.01f * pick(random, -300, 600);
      if (kind > 2) out.fill_random(random, row * kNope, (row + 1) * kNope);  // of an empty side NaN
    }
    carried_out_ = out;
    carried_lse_ = lse;
  }

  // As prepared.
  void restore() {
    out = carried_out_;
    lse = carried_lse_;
  }

  // With whole keys, whatever the shape says.
  PrefillParams whole_params() {
    PrefillParams p = params();
    p.k = k.data();
    p.k_pe = nullptr;
    p.k_stride = kHeadDim;
    return p;
  }

  PrefillParams params() {
    if (shape.tiled) tile_values();
    if (in_parts()) make_parts();
    PrefillParams p{};
    p.q = q.data();
    p.k = !in_parts() ? k.data() : is_up_projection() ? v.data() : nope_.data();
    p.k_pe = in_parts() ? k_pe_.data() : nullptr;
    p.k_stride = in_parts() ? shape.nope_width : kHeadDim;
    p.k_pe_stride = shape.rope_width;
    p.k_pe_offset = shape.rope_width - kRope;
    p.v = shape.tiled ? tiles_.data() : v.data();
    p.v_stride = value_stride();
    p.v_offset = value_offset();
    p.cu_q_lens = cu_q_lens.data();
    p.cu_kv_lens = cu_kv_lens.data();
    p.key_mask = shape.key_mask ? key_mask.data() : nullptr;
    p.q_scale = q_scale == 1 ? nullptr : q_scale.data();
    p.k_scale = k_scale == 1 ? nullptr : k_scale.data();
    p.v_scale = v_scale == 1 ? nullptr : v_scale.data();
    p.out = out.data();
    p.lse = lse.data();
    p.stored = stored;
    p.tokens = tokens;
    p.batch = static_cast<int32_t>(shape.q_lens.size());
    p.heads = shape.heads;
    p.scale = scale;
    p.causal = shape.causal;
    p.merge = shape.merge;
    p.dtype = shape.type;
    p.v_dtype = shape.value_type;
    p.v_tiled = shape.tiled;
    p.out_dtype = out.type;
    return p;
  }

  // What e4m3's products lose of a score: the 14 bits of partial sums below 64 end at 2^-8, where addends of six
  // products lose up to one each; eight such losses are allowed.
  double score_error() const { return is_fp8(shape.type) ? std::fabs(scale * q_scale * k_scale) / 32 : 0; }
  double lse_tolerance() const { return 1e-3 + score_error(); }
  double out_tolerance() const {
    // Weights have three bits behind the first: each is off by 2^-4 at most, and so is a row.
    if (is_fp8(shape.value_type)) return 6.25e-2 + score_error() / 2;
    return (shape.type == DType::kF16 ? 2e-3 : 1e-2) + score_error() / 2;
  }

  // What is wrong, or nothing.
  std::string compare(double out_tolerance, double lse_tolerance, double* worst) const {
    for (int32_t token = 0; token < tokens; ++token) {
      for (int head = 0; head < shape.heads; ++head) {
        const std::string wrong = compare_row(token, head, out_tolerance, lse_tolerance, worst);
        if (!wrong.empty()) return wrong + " in token " + std::to_string(token) + " head " + std::to_string(head);
      }
    }
    return {};
  }

 private:
  // Nope parts and values lie side by side.
  bool is_up_projection() const { return shape.nope_width == 2 * kNope && shape.whole_values; }

  // The same keys in parts, amid NaN.
  void make_parts() {
    nope_ = Array(shape.type, int64_t{stored} * shape.heads * shape.nope_width);
    k_pe_ = Array(shape.type, int64_t{stored} * shape.rope_width);
    nope_.fill_nan();
    k_pe_.fill_nan();
    part_keys(k, stored, shape.heads, is_up_projection() ? v : nope_, shape.nope_width, k_pe_, shape.rope_width);
  }

  void tile_values() {
    constexpr int kOrder[kValueTile] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
    const int tiles = (stored + kValueTile - 1) / kValueTile;
    tiles_ = Array(shape.value_type, int64_t{tiles} * shape.heads * kNope * kValueTile);
    for (int64_t i = 0; i < tiles_.count(); ++i) {
      const int64_t row = i / kValueTile / kNope, column = i / kValueTile % kNope, head = row % shape.heads;
      const int64_t key = row / shape.heads * kValueTile + kOrder[i % kValueTile];
      const int64_t from = value_offset() + (key * shape.heads + head) * value_stride() + column;
      tiles_.set_code(i, key < stored ? v.code(from) : 0);
    }
  }

  Array tiles_, nope_, k_pe_;
  Array carried_out_;
  Buffer<float> carried_lse_;

  struct Row {
    double lse = -kInfinity;
    double out[kNope] = {};
    bool has_nan = false;  // saw a value that is not finite
  };

  Row attend(int32_t token, int head) const {
    Row row;
    const auto after = std::upper_bound(cu_q_lens.begin(), cu_q_lens.end(), token);
    if (after == cu_q_lens.begin() || after == cu_q_lens.end()) return row;
    const auto b = after - cu_q_lens.begin() - 1;
    const int32_t first = cu_kv_lens[b], keys = cu_kv_lens[b + 1] - first, queries = cu_q_lens[b + 1] - cu_q_lens[b];
    const int32_t last = shape.causal ? std::min(keys - queries + token - cu_q_lens[b] + 1, keys) : keys;
    double highest = -kInfinity, total = 0;
    std::vector<double> scores(std::max(last, 0));
    const int64_t query = (int64_t{token} * shape.heads + head) * kHeadDim;
    for (int32_t j = 0; j < last; ++j) {
      scores[j] = -kInfinity;
      if (masked(first + j)) continue;
      const int64_t key = (int64_t{first + j} * shape.heads + head) * kHeadDim;
      double sum = 0;
      for (int c = 0; c < kHeadDim; ++c) sum += q.at(query + c) * k.at(key + c);
      scores[j] = sum * scale * q_scale * k_scale;
      highest = std::max(highest, scores[j]);
    }
    if (highest == -kInfinity) return row;
    for (int32_t j = 0; j < last; ++j) {
      if (masked(first + j)) continue;
      const double weight = std::exp(scores[j] - highest);
      const int64_t value = value_offset() + (int64_t{first + j} * shape.heads + head) * value_stride();
      row.has_nan = row.has_nan || !std::isfinite(v.at(value));
      total += weight;
      for (int c = 0; c < kNope; ++c) row.out[c] += weight * v.at(value + c);
    }
    row.lse = highest + std::log(total);
    for (double& x : row.out) x *= v_scale / total;
    return row;
  }

  std::string compare_row(int32_t token, int head, double out_tolerance, double lse_tolerance, double* worst) const {
    const int64_t index = int64_t{token} * shape.heads + head;
    Row row = attend(token, head);
    if (shape.merge) {
      if (row.lse == -kInfinity) {  // untouched, bit for bit
        for (int c = 0; c < kNope; ++c) {
          if (out.code(index * kNope + c) != carried_out_.code(index * kNope + c)) return "a row without keys: out";
        }
        return std::memcmp(&lse[index], &carried_lse_[index], 4) == 0 ? "" : "a row without keys: lse";
      }
      const double carried = carried_lse_[index];
      if (std::isfinite(carried)) {
        const double highest = std::max(carried, row.lse);
        const double a = std::exp(carried - highest), b = std::exp(row.lse - highest);
        for (int c = 0; c < kNope; ++c) {
          row.out[c] = (a * carried_out_.at(index * kNope + c) + b * row.out[c]) / (a + b);
        }
        row.lse = highest + std::log(a + b);
      }
    }
    double difference = 0, norm = 0;
    bool all_finite = true;
    for (int c = 0; c < kNope; ++c) {
      const double x = out.at(index * kNope + c);
      all_finite = all_finite && std::isfinite(x);
      difference += (x - row.out[c]) * (x - row.out[c]);
      norm += row.out[c] * row.out[c];
    }
    if (row.lse == -kInfinity) return difference == 0 && lse[index] == -kInfinity ? "" : "an empty row is not empty";
    if (!(std::fabs(lse[index] - row.lse) <= lse_tolerance)) {
      return "lse " + std::to_string(lse[index]) + " instead of " + std::to_string(row.lse);
    }
    if (row.has_nan) return all_finite ? "a value that is not finite was lost" : "";
    const double error = std::sqrt(difference / norm);
    if (!(error <= out_tolerance)) return "out is off by " + std::to_string(error);
    *worst = std::max(*worst, error);
    return {};
  }
};

}  // namespace mla::test
