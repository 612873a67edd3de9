// Groups of the ROCm driver alone: what the module refuses, and kernels that CPUs have no counterpart of.
#pragma once

#include "kernels/decode/gfx9/heads.h"
#include "kernels/decode/reduce.h"
#include "tests/native/ds_mla.h"
#include "tests/native/helper_groups.h"
#include "tests/native/plan_case.h"

namespace mla::test {

// merge_states of one row each of width 8: 1 and 3 with equal weights.
inline Error small_merge() {
  Buffer<float> a(8, 1.0f), b(8, 3.0f), out(8), lse_a(1, 0.5f), lse_b(1, 0.5f), lse(1);
  const MergeStatesParams p{a.data(), lse_a.data(), b.data(), lse_b.data(), out.data(), lse.data(), 1, 8, DType::kF32};
  const Error error = merge_states(p, device_with(1));
  if (error.empty() && out[7] != 2.0f) return "1 and 3 were merged to " + std::to_string(out[7]);
  return error;
}

// Entry functions refuse what no kernel takes, and name it.
inline void test_refusals() {
  const Device device = device_with(1);
  const auto refused = [](const Error& error, const std::string& words) {
    report.expect(error.find(words) != Error::npos, "expected an error with '" + words + "', got '" + error + "'");
  };
  MergeStatesParams merge{};
  merge.rows = 1;
  merge.dtype = DType::kE4M3FN;
  refused(merge_states(merge, device), "merge_states on AMD cannot merge float8_e4m3fn");
  UpdateCacheParams update{};
  update.tokens = 1;
  update.input_dtype = DType::kBF16;
  update.cache_dtype = DType::kF16;
  refused(update_cache(update, device), "cannot store bfloat16 in a cache of float16");
  Scalar<float> scale{1.0f};
  update.cache_dtype = DType::kBF16;
  update.k_scale = scale.data();
  refused(update_cache(update, device), "cannot store bfloat16 in a cache of bfloat16 with k_scale");
  update.cache_dtype = DType::kE4M3FN;
  update.ds_mla = true;
  refused(update_cache(update, device), "cannot store bfloat16 in a cache of fp8_ds_mla with k_scale");
  update.ds_mla = false;
  update.input_dtype = DType::kE4M3FN;
  update.k_scale = nullptr;
  refused(update_cache(update, device), "cannot store float8_e4m3fn");
  GatherContextParams gather{};
  gather.rows = 1;
  gather.output_dtype = DType::kE4M3FNUZ;
  refused(gather_context(gather, device), "gather_context on AMD cannot write float8_e4m3fnuz");
  PackKvParams pack{};
  pack.tokens = pack.heads = 1;
  pack.input_dtype = pack.k_pe_dtype = DType::kBF16;
  pack.output_dtype = DType::kF16;
  refused(pack_kv(pack, device), "cannot pack bfloat16 with a rope key in bfloat16 to float16");
  pack.output_dtype = DType::kE4M3FNUZ;
  pack.v = scale.data();
  pack.v_tiled = true;
  refused(pack_kv(pack, device), "to float8_e4m3fnuz, with values in tiles");
  pack.v_tiled = false;
  pack.tokens = int64_t{1} << 40;
  refused(pack_kv(pack, device), "are more than a grid holds");
  PlanDecodeParams plan{};
  refused(plan_decode(plan, device), "plan_decode has 0 parts");
  DecodeParams decode{};
  decode.heads = 25;
  refused(reduce(decode, device, false), "does not take 25 heads");
  decode.heads = 4096;
  decode.tokens = 1 << 20;
  refused(reduce(decode, device, false), "rows are too many");
  decode.tokens = 1;
  decode.out_dtype = DType::kF32;
  refused(reduce(decode, device, false), "mla_decode on AMD cannot write float32");
  report.group("refusals");
}

// Rows of fp8_ds_mla, bit for bit, the bits of a NaN aside: groups of any magnitude, zeros, what is not finite.
inline void test_update_ds_mla() {
  Random random(19);
  for (DType input : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (bool power_of_two : {false, true}) {
      constexpr int kTokens = 21;
      Array kv_c(input, int64_t{kTokens} * kLatent), k_pe(input, int64_t{kTokens} * kRope),
          cache(DType::kE4M3FN, int64_t{kTokens} * kDsMlaBytes);
      k_pe.fill_random(random, 0, k_pe.count());
      Buffer<int32_t> slots;
      for (int t = 0; t < kTokens; ++t) slots.push_back(kTokens - 1 - t);
      for (int64_t i = 0; i < kv_c.count(); ++i) {
        const int exponent = static_cast<int>(i / kDsMlaGroup % 7) * 4 - 14;
        const double x = std::ldexp(pick(random, -1000, 1000) / 700.0, exponent);
        const bool wild = i / kDsMlaGroup % 5 == 3 && pick(random, 0, 30) == 0;
        kv_c.set(i, wild ? choose(random, {kInfinity, -kInfinity, kNaN}) : i / kDsMlaGroup % 11 == 2 ? 0 : x);
      }
      UpdateCacheParams p = update_params(cache, kv_c, k_pe, slots, 1);
      p.pages = kTokens;
      p.ds_mla = true;
      p.power_of_two_scales = power_of_two;
      report.expect_success(update_cache(p, device_with(1)));
      for (int t = 0; t < kTokens; ++t) {
        const int64_t row = int64_t{slots[t]} * kDsMlaBytes;
        for (int group = 0; group < kLatent / kDsMlaGroup; ++group) {
          const int64_t first = int64_t{t} * kLatent + group * kDsMlaGroup;
          float largest = 1e-4f;
          for (int c = 0; c < kDsMlaGroup; ++c) {
            const auto magnitude = static_cast<float>(std::fabs(kv_c.at(first + c)));
            if (magnitude < kInfinity) largest = std::max(largest, magnitude);
          }
          float scale = largest / 448.0f, stored;
          if (power_of_two) scale = std::exp2(std::ceil(std::log2(scale)));
          std::memcpy(&stored, cache.bytes.data() + row + kLatent + group * 4, sizeof(stored));
          report.expect(stored == scale,
                        "a scale of fp8_ds_mla is " + std::to_string(stored) + ", expected " + std::to_string(scale));
          for (int c = 0; c < kDsMlaGroup; ++c) {
            const float x = static_cast<float>(kv_c.at(first + c)) / scale;
            const uint32_t wanted = encode(DType::kE4M3FN, std::isfinite(x) ? x : kNaN);
            report.expect(same_but_nan_sign(DType::kE4M3FN, wanted, cache.code(row + group * kDsMlaGroup + c)),
                          "a value of fp8_ds_mla in column " + std::to_string(group * kDsMlaGroup + c));
          }
        }
        for (int c = 0; c < kRope; ++c) {
          uint16_t code;
          std::memcpy(&code, cache.bytes.data() + row + kDsMlaRopeByte + 2 * c, sizeof(code));
          report.expect(code == encode(DType::kBF16, k_pe.at(int64_t{t} * kRope + c)), "a rope value of fp8_ds_mla");
        }
      }
    }
  }
  report.group("update_cache of fp8_ds_mla");
}

// Values in tiles, whose layout kValueTile describes; behind the last token are zeros.
inline void test_pack_tiles() {
  Random random(12);
  constexpr int kPlaces[kValueTile] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};  // tokens in their order
  for (DType input : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (int tokens : {1, 15, 33}) {
      const int heads = 3, tiles = (tokens + kValueTile - 1) / kValueTile;
      Array kv_up(input, int64_t{tokens} * heads * 2 * kNope), k_pe(input, int64_t{tokens} * kRope);
      kv_up.fill_random(random, 0, kv_up.count());
      k_pe.fill_random(random, 0, k_pe.count());
      Array k(DType::kE4M3FN, int64_t{tokens} * heads * kHeadDim),
          v(DType::kE4M3FN, int64_t{tiles} * heads * kNope * kValueTile);
      Scalar<float> scale(0.6f);
      PackKvParams p{};
      p.kv_up = kv_up.data();
      p.k_pe = k_pe.data();
      p.packed_v_scale = scale.data();
      p.k = k.data();
      p.v = v.data();
      p.k_pe_stride = kRope;
      p.tokens = tokens;
      p.heads = heads;
      p.v_tiled = true;
      p.input_dtype = p.k_pe_dtype = input;
      p.output_dtype = DType::kE4M3FN;
      report.expect_success(pack_kv(p, device_with(1)));
      for (int64_t i = 0; i < v.count(); ++i) {
        const int64_t place = i % kValueTile, column = i / kValueTile % kNope, row = i / kValueTile / kNope;
        const int64_t token = row / heads * kValueTile + kPlaces[place], head = row % heads;
        const int64_t at = (token * heads + head) * 2 * kNope + kNope + column;
        const float x = token < tokens ? static_cast<float>(kv_up.at(at)) / 0.6f : 0.0f;
        report.expect(v.code(i) == encode(DType::kE4M3FN, x), "a value in tiles, element " + std::to_string(i));
      }
    }
  }
  report.group("pack_kv_fp8, values in tiles");
}

// The reduction over partials of any number, some of them of pieces without keys, against float64.
inline void test_reduce() {
  Random random(18);
  for (int i = 0; i < (quick ? 12 : 60); ++i) {
    DecodeShape s;
    s.q_type = choose(random, {DType::kBF16, DType::kF16});
    s.cache_type = s.q_type;
    s.heads = choose(random, {16, 24, 32, 48});
    if (!gfx9::contains(gfx9::reducer_heads(), s.heads)) s.heads = 32;
    s.max_q_len = pick(random, 1, 3);
    s.page_size = 64;
    s.ragged = pick(random, 0, 1) == 1;
    s.kv_lens = std::vector<int>{0, 40, 5000, 700, choose(random, {1, 300})};
    for (int b = 0; b < s.batch(); ++b) s.q_lens.push_back(s.ragged ? pick(random, 0, s.max_q_len) : s.max_q_len);
    s.q_lens[2] = s.max_q_len;
    s.extra_tokens = s.ragged ? pick(random, 0, 2) : 0;
    s.parts = choose(random, {3, 17, 80});
    s.batch_invariant = pick(random, 0, 3) == 0;
    PlanCase plan(s);
    report.expect_success(plan_decode(plan.params(), device_with(1)));
    const DecodePlan layout = plan.params().plan;
    const int64_t tokens = s.ragged ? plan.cu_q_lens.back() + s.extra_tokens : s.batch() * s.max_q_len;
    Array out(s.q_type, tokens * s.heads * kLatent);
    out.fill_nan();
    const Array untouched = out;
    const int64_t partial_rows = int64_t{layout.max_partials} * s.tile_rows;
    Buffer<float> lse(tokens * s.heads, kNaN), partial_lse(partial_rows, kNaN),
        partial_out(partial_rows * kLatent, kNaN);
    for (const TileSplits& splits : plan.splits) {
      for (int64_t row = int64_t{splits.first_partial} * s.tile_rows;
           splits.count > 1 && row < int64_t{splits.first_partial + splits.count} * s.tile_rows; ++row) {
        partial_lse[row] = pick(random, 0, 4) == 0 ? -kInfinity : 0.1f * pick(random, -60, 60);
        for (int c = 0; c < kLatent && partial_lse[row] != -kInfinity; ++c) {
          partial_out[row * kLatent + c] = 0.01f * pick(random, -200, 200);
        }
      }
    }
    DecodeParams p{};
    p.cu_q_lens = s.ragged ? plan.cu_q_lens.data() : nullptr;
    p.plan = layout;
    p.out = out.data();
    p.lse = lse.data();
    p.partial_out = partial_out.data();
    p.partial_lse = partial_lse.data();
    p.layers = 1;
    p.batch = s.batch();
    p.tokens = static_cast<int32_t>(tokens);
    p.heads = s.heads;
    p.max_q_len = s.max_q_len;
    p.out_dtype = s.q_type;
    report.expect_success(reduce(p, device_with(1), false));
    const Array first = out;
    const auto first_lse = lse;
    report.expect_success(reduce(p, device_with(1), false));
    report.expect(first.bytes == out.bytes && std::memcmp(first_lse.data(), lse.data(), lse.size() * 4) == 0,
                  "the reduction gave other bits: " + s.text());

    for (int64_t row = 0; row < tokens * s.heads; ++row) {
      const int64_t token = row / s.heads;
      int b = 0;
      const auto begin = [&](int request) {
        return s.ragged ? int64_t{plan.cu_q_lens[request]} : int64_t{request} * s.max_q_len;
      };
      while (b < s.batch() && token >= begin(b + 1)) ++b;
      TileSplits splits{-1, 0};
      int64_t local = 0;
      if (b < s.batch()) {
        const int64_t request_row = (token - begin(b)) * s.heads + row % s.heads;
        splits = plan.splits[b * layout.row_tiles + request_row / s.tile_rows];
        local = request_row % s.tile_rows;
      }
      if (splits.count == 1) {  // written by the attention kernel
        report.expect(std::isnan(lse[row]) && out.code(row * kLatent) == untouched.code(row * kLatent),
                      "the reduction wrote an unsplit row: " + s.text());
        continue;
      }
      double largest = -kInfinity, sum = 0;
      std::vector<double> wanted(kLatent, 0.0);
      const auto partial = [&](int k) { return int64_t{splits.first_partial + k} * s.tile_rows + local; };
      for (int k = 0; k < splits.count; ++k) largest = std::max(largest, double{partial_lse[partial(k)]});
      for (int k = 0; k < splits.count; ++k) {
        if (partial_lse[partial(k)] == -kInfinity) continue;
        const double weight = std::exp(partial_lse[partial(k)] - largest);
        sum += weight;
        for (int c = 0; c < kLatent; ++c) wanted[c] += weight * partial_out[partial(k) * kLatent + c];
      }
      const double wanted_lse = sum == 0 ? -kInfinity : largest + std::log(sum);
      report.expect(lse[row] == wanted_lse || std::fabs(lse[row] - wanted_lse) <= 1e-5,
                    "lse " + std::to_string(lse[row]) + " in row " + std::to_string(row) + ": " + s.text());
      for (int c = 0; c < kLatent; ++c) {
        const double value = sum == 0 ? 0 : wanted[c] / sum, got = out.at(row * kLatent + c);
        report.expect(std::fabs(got - value) <= (s.q_type == DType::kBF16 ? 8e-3 : 1e-3) * (std::fabs(value) + 0.01),
                      "out " + std::to_string(got) + ", expected " + std::to_string(value) + " in row " +
                          std::to_string(row) + ": " + s.text());
      }
    }
  }
  report.group("reduction");
}

}  // namespace mla::test
