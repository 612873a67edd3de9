// Tests of prefill, one function a group.
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/capability.h"
#include "kernels/entry.h"
#include "tests/native/key_parts.h"
#include "tests/native/support.h"

namespace mla::test {

struct PrefillShape {
  DType type = DType::kBF16;
  int variant = 0;
  int heads = 3;
  std::vector<int> q_lens, kv_lens;
  int extra_tokens = 0, extra_keys = 0;  // that no request owns
  bool causal = true;
  bool whole_values = false;  // inside an up-projection
  bool merge = false;
  bool masked = false;
  int nope_width = 0, rope_width = 0;  // keys in parts: of an array of nope parts, and of rope keys
  float scale = 0.0722f;

  std::string text() const {
    std::string text = std::string(name_of(type)) + " variant " + std::to_string(variant) + " heads " +
                       std::to_string(heads) + " extra " + std::to_string(extra_tokens) + "/" +
                       std::to_string(extra_keys);
    for (size_t b = 0; b < q_lens.size(); ++b) {
      text += " " + std::to_string(q_lens[b]) + "x" + std::to_string(kv_lens[b]);
    }
    return text + (causal ? " causal" : "") + (whole_values ? " whole" : "") + (merge ? " merge" : "") +
           (masked ? " masked" : "") + " parts " + std::to_string(nope_width) + " " + std::to_string(rope_width);
  }
};

// One call and its truth. What nobody may read is NaN.
struct PrefillCase {
  PrefillShape shape;
  Buffer<int32_t> cu_q, cu_kv;
  int tokens = 0, stored = 0;
  int64_t v_stride = kNope, v_offset = 0;
  Array q, k, v, out, carry_out;
  Array nope, k_pe;  // the keys once more, in parts
  Buffer<float> lse, carry_lse;
  Buffer<uint32_t> key_mask;

  PrefillCase(const PrefillShape& s, Random& random) : shape(s) {
    cu_q.push_back(0);
    cu_kv.push_back(0);
    for (size_t b = 0; b < s.q_lens.size(); ++b) {
      cu_q.push_back(cu_q.back() + s.q_lens[b]);
      cu_kv.push_back(cu_kv.back() + s.kv_lens[b]);
    }
    tokens = cu_q.back() + s.extra_tokens;
    stored = cu_kv.back() + s.extra_keys;
    if (s.whole_values) v_stride = 2 * kNope, v_offset = kNope;
    q = Array(s.type, int64_t{tokens} * s.heads * kHeadDim);
    k = Array(s.type, int64_t{stored} * s.heads * kHeadDim);
    v = Array(s.type, int64_t{stored} * s.heads * v_stride);
    q.fill_random(random, 0, int64_t{cu_q.back()} * s.heads * kHeadDim);
    k.fill_random(random, 0, int64_t{cu_kv.back()} * s.heads * kHeadDim);
    if (in_parts()) share_rope(k, stored, s.heads);
    key_mask.assign((stored + 31) / 32, 0);
    for (int key = 0; key < stored; ++key) {
      const bool seen = !s.masked || pick(random, 0, 3) > 0;
      if (seen) key_mask[key / 32] |= 1u << key % 32;
      for (int64_t row = int64_t{key} * s.heads; row < int64_t{key + 1} * s.heads && key < cu_kv.back(); ++row) {
        if (seen) v.fill_random(random, row * v_stride + v_offset, row * v_stride + v_offset + kNope);
        for (int c = 0; c < kHeadDim && !seen; ++c) k.set_code(row * kHeadDim + c, nan_code(s.type));
      }
    }
    out = Array(s.merge ? DType::kF32 : s.type, int64_t{tokens} * s.heads * kNope);
    lse.assign(size_t(tokens) * s.heads, kNaN);
    if (s.merge) {
      out.fill_random(random, 0, out.count());
      for (size_t row = 0; row < lse.size(); ++row) {
        lse[row] = choose(random, {-kInfinity, kNaN, kInfinity, 0.0f, 5.0f, pick(random, -40, 40) / 10.0f});
        for (int c = 0; c < kNope && !std::isfinite(lse[row]); ++c) out.set_code(row * kNope + c, nan_code(out.type));
      }
    }
    carry_out = out;
    carry_lse = lse;
  }

  bool in_parts() const { return shape.nope_width != 0; }

  // The same keys in parts, amid NaN; in the up-projection beside the values where there is one.
  void give_parts(PrefillParams& p) {
    nope = Array(shape.type, int64_t{stored} * shape.heads * shape.nope_width);
    k_pe = Array(shape.type, int64_t{stored} * shape.rope_width);
    Array& target = shape.nope_width == v_stride && shape.whole_values ? v : nope;
    part_keys(k, stored, shape.heads, target, shape.nope_width, k_pe, shape.rope_width);
    p.k = target.data();
    p.k_stride = shape.nope_width;
    p.k_pe = k_pe.data();
    p.k_pe_stride = shape.rope_width;
    p.k_pe_offset = shape.rope_width - kRope;
  }

  PrefillParams params() {
    PrefillParams p{};
    p.q = q.data();
    p.k = k.data();
    p.k_stride = kHeadDim;
    if (in_parts()) give_parts(p);
    p.v = v.data();
    p.v_stride = v_stride;
    p.v_offset = v_offset;
    p.cu_q_lens = cu_q.data();
    p.cu_kv_lens = cu_kv.data();
    p.key_mask = shape.masked ? key_mask.data() : nullptr;
    p.out = out.data();
    p.lse = lse.data();
    p.stored = stored;
    p.tokens = tokens;
    p.batch = static_cast<int32_t>(cu_q.size()) - 1;
    p.heads = shape.heads;
    p.variant = shape.variant;
    p.scale = shape.scale;
    p.causal = shape.causal;
    p.merge = shape.merge;
    p.dtype = p.v_dtype = shape.type;
    p.out_dtype = out.type;
    return p;
  }

  Error run(const Device& device) {
    out = carry_out;
    lse = carry_lse;
    return prefill(params(), device);
  }

  // The keys that a query sees.
  std::vector<int> visible(int token) const {
    std::vector<int> keys;
    for (size_t b = 0; b + 1 < cu_q.size(); ++b) {
      if (token < cu_q[b] || token >= cu_q[b + 1]) continue;
      const int limit = shape.causal ? cu_kv[b + 1] - cu_q[b + 1] + token + 1 : cu_kv[b + 1];
      for (int key = cu_kv[b]; key < std::min(limit, cu_kv[b + 1]); ++key) {
        if ((key_mask[key / 32] >> key % 32 & 1) != 0) keys.push_back(key);
      }
    }
    return keys;
  }

  // Empty, or what is wrong.
  std::string compare(double tolerance, double lse_tolerance, double* worst) {
    double difference = 0, size = 0;
    for (int64_t row = 0; row < int64_t{tokens} * shape.heads; ++row) {
      const std::vector<int> keys = visible(static_cast<int>(row / shape.heads));
      std::vector<double> scores, sum(kNope, 0.0);
      double largest = -kInfinity, total = 0;
      for (int key : keys) {
        const int64_t at = (int64_t{key} * shape.heads + row % shape.heads) * kHeadDim;
        double score = 0;
        for (int c = 0; c < kHeadDim; ++c) score += q.at(row * kHeadDim + c) * k.at(at + c);
        scores.push_back(score * shape.scale);
        largest = std::max(largest, scores.back());
      }
      for (size_t i = 0; i < keys.size(); ++i) {
        const double weight = std::exp(scores[i] - largest);
        const int64_t at = (int64_t{keys[i]} * shape.heads + row % shape.heads) * v_stride + v_offset;
        total += weight;
        for (int c = 0; c < kNope; ++c) sum[c] += weight * v.at(at + c);
      }
      const float carry = carry_lse[row];
      const bool has_carry = shape.merge && std::isfinite(carry);
      if (keys.empty()) {
        const int64_t bytes = kNope * size_of(out.type);
        const bool kept = std::memcmp(&lse[row], &carry, sizeof(carry)) == 0 &&
                          std::memcmp(out.bytes.data() + row * bytes, carry_out.bytes.data() + row * bytes, bytes) == 0;
        bool zero = lse[row] == -kInfinity;
        for (int c = 0; c < kNope; ++c) zero &= out.at(row * kNope + c) == 0;
        if (shape.merge ? !kept : !zero) return "row " + std::to_string(row) + " without keys";
        continue;
      }
      double wanted_lse = largest + std::log(total), share = 1 / total, carry_share = 0;
      if (has_carry) {
        const double both = std::max<double>(wanted_lse, carry) +
                            std::log1p(std::exp(-std::fabs(wanted_lse - static_cast<double>(carry))));
        share *= std::exp(wanted_lse - both);
        carry_share = std::exp(carry - both);
        wanted_lse = both;
      }
      if (!(std::fabs(lse[row] - wanted_lse) <= lse_tolerance)) {
        return "lse of row " + std::to_string(row) + " is " + std::to_string(lse[row]) + ", expected " +
               std::to_string(wanted_lse);
      }
      double row_difference = 0, row_size = 0;
      for (int c = 0; c < kNope; ++c) {
        const int64_t at = row * kNope + c;
        const double wanted = sum[c] * share + (has_carry ? carry_out.at(at) * carry_share : 0);
        row_difference += std::pow(out.at(at) - wanted, 2);
        row_size += wanted * wanted;
      }
      if (!(std::sqrt(row_difference / row_size) <= 2 * tolerance)) {
        return "row " + std::to_string(row) + " is off by " + std::to_string(std::sqrt(row_difference / row_size));
      }
      difference += row_difference;
      size += row_size;
    }
    const double error = size > 0 ? std::sqrt(difference / size) : 0;
    *worst = std::max(*worst, error);
    return error <= tolerance ? "" : "relative error " + std::to_string(error);
  }
};

inline double prefill_tolerance(DType type) { return type == DType::kF32 ? 1e-5 : type == DType::kF16 ? 1e-3 : 1e-2; }
inline double prefill_lse_tolerance(DType type) { return type == DType::kBF16 ? 1e-3 : 2e-5; }

constexpr DType kPrefillTypes[] = {DType::kBF16, DType::kF16, DType::kF32};

inline std::vector<int> prefill_variants_here() {
  std::vector<int> here;
  const auto names = variants();
  const auto rows = capabilities();
  for (size_t i = 0; i < names.size(); ++i) {
    const bool runs = std::any_of(rows.begin(), rows.end(), [&](const Capability& row) {
      return std::string(row.variant) == names[i] && std::string(row.operation) == "mla_prefill";
    });
    if (runs) here.push_back(static_cast<int>(i) + 1);
  }
  return here;
}

inline PrefillShape random_prefill(Random& random, int variant, DType type) {
  PrefillShape s;
  s.variant = variant;
  s.type = type;
  s.heads = choose(random, {1, 2, 3, 5});
  s.causal = pick(random, 0, 2) > 0;
  s.whole_values = pick(random, 0, 1) == 1;
  s.merge = pick(random, 0, 1) == 1;
  s.masked = pick(random, 0, 2) == 0;
  if (pick(random, 0, 1) == 1) {
    s.nope_width = choose(random, {kNope, 2 * kNope});
    s.rope_width = choose(random, {kRope, kWidth});
  }
  const int batch = pick(random, 1, 4);
  for (int b = 0; b < batch; ++b) {
    s.q_lens.push_back(choose(random, {0, 1, 2, pick(random, 0, 20), pick(random, 90, 200)}));
    s.kv_lens.push_back(
        choose(random, {0, 1, 2, 31, 33, 65, s.q_lens[b], s.q_lens[b] + pick(random, 1, 300), pick(random, 0, 300)}));
  }
  s.extra_tokens = pick(random, 0, 2);
  s.extra_keys = pick(random, 0, 40);
  if (s.extra_tokens == 0) s.q_lens[0] = std::max(s.q_lens[0], 1);
  if (s.extra_keys == 0) s.kv_lens[0] = std::max(s.kv_lens[0], 1);
  return s;
}

inline bool same_rows(const PrefillCase& a, int64_t a_row, const PrefillCase& b, int64_t b_row, int64_t rows) {
  const int64_t bytes = kNope * size_of(a.out.type);
  return std::memcmp(a.out.bytes.data() + a_row * bytes, b.out.bytes.data() + b_row * bytes, rows * bytes) == 0 &&
         std::memcmp(a.lse.data() + a_row, b.lse.data() + b_row, rows * sizeof(float)) == 0;
}

inline void check_prefill(PrefillCase& problem, const Device& device, double* worst) {
  std::string error = problem.run(device);
  const DType type = problem.shape.type;
  if (error.empty()) error = problem.compare(prefill_tolerance(type), prefill_lse_tolerance(type), worst);
  report.expect(error.empty(), error + " [" + problem.shape.text() + "]");
  if (!problem.in_parts()) return;
  PrefillCase whole = problem;
  whole.shape.nope_width = 0;
  error = whole.run(device);
  report.expect(error.empty() && same_rows(problem, 0, whole, 0, int64_t{problem.tokens} * problem.shape.heads),
                "keys in parts give other bits: " + error + " [" + problem.shape.text() + "]");
}

inline void test_prefill_sweep(const Device& device) {
  Random random(21);
  for (int variant : prefill_variants_here()) {
    for (DType type : kPrefillTypes) {
      double worst = 0;
      for (int i = 0; i < (quick ? 5 : 20); ++i) {
        PrefillCase problem(random_prefill(random, variant, type), random);
        check_prefill(problem, device, &worst);
      }
      char detail[64];
      std::snprintf(detail, sizeof(detail), "worst relative error %.1e", worst);
      report.group(std::string("prefill ") + variants()[variant - 1] + " " + name_of(type), detail);
    }
  }
}

// For any number of threads, again and again, and alone as beside others.
inline void test_prefill_determinism() {
  Random random(22);
  for (int variant : prefill_variants_here()) {
    for (DType type : kPrefillTypes) {
      PrefillShape s;
      s.variant = variant;
      s.type = type;
      s.q_lens = std::vector<int>{400, 5, 100};
      s.kv_lens = std::vector<int>{500, 5, 300};
      PrefillCase problem(s, random);
      problem.run(device_with(1));
      for (int threads : {1, 2, 5, 40}) {
        PrefillCase again = problem;
        again.run(device_with(threads));
        report.expect(same_rows(problem, 0, again, 0, int64_t{problem.tokens} * s.heads),
                      "other bits with " + std::to_string(threads) + " threads: " + s.text());
      }
      PrefillCase alone = problem;
      alone.cu_q = Buffer<int32_t>{problem.cu_q[2], problem.cu_q[3]};
      alone.cu_kv = Buffer<int32_t>{problem.cu_kv[2], problem.cu_kv[3]};
      alone.run(device_with(2));
      const int64_t first = int64_t{problem.cu_q[2]} * s.heads;
      report.expect(same_rows(problem, first, alone, first, int64_t{100} * s.heads), "alone differs: " + s.text());
    }
  }
  report.group("prefill, same bits");
}

// NaN or an infinity in a token reaches the queries that see it, and changes no bit of the others.
inline void test_prefill_hidden_nan(const Device& device) {
  Random random(23);
  for (int variant : prefill_variants_here()) {
    for (DType type : kPrefillTypes) {
      for (int spoiled : {0, 1, 50, 95, 96, 159}) {
        PrefillShape s;
        s.variant = variant;
        s.type = type;
        s.q_lens = std::vector<int>{160, 20};
        s.kv_lens = std::vector<int>{160, 20};
        PrefillCase problem(s, random);
        problem.run(device);
        PrefillCase poisoned = problem;
        const uint32_t infinity = encode(type, kInfinity);
        for (int64_t row = int64_t{spoiled} * s.heads; row < int64_t{spoiled + 1} * s.heads; ++row) {
          for (int c = 0; c < kNope; ++c) poisoned.v.set_code(row * kNope + c, spoiled % 2 ? infinity : nan_code(type));
          for (int c = 0; c < kHeadDim && spoiled != 50; ++c) {
            poisoned.k.set_code(row * kHeadDim + c, nan_code(type));
          }
        }
        poisoned.run(device);
        const int64_t hidden = int64_t{spoiled} * s.heads, next = int64_t{160} * s.heads;
        report.expect(same_rows(problem, 0, poisoned, 0, hidden) &&
                          same_rows(problem, next, poisoned, next, int64_t{20} * s.heads),
                      "a query changed with a token that it does not see: " + s.text());
        for (int64_t i = hidden * kNope; i < next * kNope; ++i) {
          if (std::isnan(poisoned.out.at(i))) continue;
          report.fail("NaN was lost for a query that sees it: " + s.text());
          break;
        }
      }
    }
  }
  report.group("prefill, NaN behind the causal limit");
}

// Offsets of any value: only that nothing outside the arrays is touched, which a sanitizer sees.
inline void test_prefill_bad_offsets() {
  Random random(24);
  for (int variant : prefill_variants_here()) {
    for (DType type : kPrefillTypes) {
      for (int i = 0; i < (quick ? 10 : 60); ++i) {
        PrefillCase garbage(random_prefill(random, variant, type), random);
        const auto any = [&] {
          return choose(
              random, {static_cast<int>(random()), INT32_MIN, INT32_MAX, pick(random, -2, 4), pick(random, -70, 300)});
        };
        for (auto* offsets : {&garbage.cu_q, &garbage.cu_kv}) {
          for (int32_t& offset : *offsets) offset = pick(random, 0, 1) == 0 ? any() : offset;
        }
        const Error error = garbage.run(device_with(2));
        report.expect(error.empty(), "offsets out of range: " + error);
      }
    }
  }
  report.group("prefill, offsets out of range");
}

}  // namespace mla::test
