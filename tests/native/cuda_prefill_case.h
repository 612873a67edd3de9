// A whole prefill call from a few numbers: random data, NaN in everything unused, poisoned results with guards behind
// them, and the same call in float64.
#pragma once

#include <algorithm>
#include <cstring>

#include "tests/native/cuda_support.h"

namespace mla::test {

// A kernel that is compiled in and that this device runs.
struct PrefillVariant {
  std::string name = "the best";
  int32_t number = 0;     // PrefillParams::variant
  bool any_scale = true;  // negative ones and 0 too
  DType dtype = DType::kBF16, v_dtype = DType::kBF16;
  bool tiled = false;  // values lie as kValueTile says

  bool fp8() const { return dtype == DType::kE4M3FN; }
  // "bf16", "e4m3fn/bf16": of queries and keys, and of values where that differs.
  std::string dtypes() const {
    return short_name(dtype) + (tiled ? "/tiles" : dtype == v_dtype ? "" : std::string("/") + short_name(v_dtype));
  }
};

struct PrefillShapes {
  PrefillVariant variant = {};
  int32_t heads = 24;
  bool causal = true;
  bool merge = false;
  bool key_mask = false;
  bool whole_values = false;               // in place in the up-projection
  bool bad_values = false;                 // some values of keys that are seen are not finite
  int32_t nope_width = 0, rope_width = 0;  // keys in parts: of an array of nope parts, and of rope keys
  std::vector<int32_t> q_lens = {200};
  std::vector<int32_t> kv_lens = {200};
  int32_t q_gap = 0, kv_gap = 0;  // tokens in front of the first request that none owns, and as many behind the last
  float scale = 0.072168784f;     // 192 ** -0.5
  float q_scale = 1, k_scale = 1, v_scale = 1;  // 1: no array
  uint64_t seed = 1;

  // What e4m3's products lose of a score below 64: the 14 bits of its partial sums end at 2^-8, where each of six
  // products cuts 33 addends off. As random signs add up that is a standard deviation of four to eight such units, less
  // as the sums are smaller; sixteen are allowed. Twice as much from 64 on (`loss_factor`), and so on.
  double product_scale() const { return variant.fp8() ? std::fabs(scale * q_scale * k_scale) : 0; }
  double score_error() const { return product_scale() / 16; }
  double out_tolerance() const {
    // Weights have three bits behind the first: each is off by 2^-4 at most, and so is a row.
    if (variant.tiled) return 6.25e-2 + score_error() / 2;
    return (variant.dtype == DType::kF16 ? 2e-3 : 1e-2) + score_error() / 2;
  }
  double lse_tolerance() const { return 1e-3 + score_error(); }

  std::string text() const {
    std::string s = variant.name + ", " + variant.dtypes() + ", heads " + std::to_string(heads) + ", scale " +
                    std::to_string(scale) + ", scales " + std::to_string(q_scale) + " " + std::to_string(k_scale) +
                    " " + std::to_string(v_scale) + (causal ? ", causal" : ", full") + (merge ? ", merge" : "") +
                    (key_mask ? ", key mask" : "") + (whole_values ? ", whole values" : "") +
                    (bad_values ? ", bad values" : "") + ", parts " + std::to_string(nope_width) + " " +
                    std::to_string(rope_width) + ", gaps " + std::to_string(q_gap) + " " + std::to_string(kv_gap) +
                    ", queries/keys";
    for (size_t b = 0; b < q_lens.size() && b < 12; ++b) {
      s += " " + std::to_string(q_lens[b]) + "/" + std::to_string(kv_lens[b]);
    }
    return s + ", seed " + std::to_string(seed);
  }
};

// Whether key `s` has a value that is not finite, in a head: then a whole row of them.
__host__ __device__ inline bool is_bad(uint64_t seed, int64_t s, int32_t head) {
  return mix(seed * 7919 + s * 131 + head) % 97 == 0;
}

__device__ inline bool is_seen(const PrefillParams& p, int64_t key) {
  return key >= p.cu_kv_lens[0] && key < p.cu_kv_lens[p.batch] &&
         (p.key_mask == nullptr || p.key_mask[key / 32] >> key % 32 & 1);
}

// What may not be read, or must not show.
template <class Key, class Value>
__global__ void spoil_kernel(PrefillParams p, Key* q, Key* k, Value* v, bool bad_values, uint64_t seed) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const Key nan = from_float<Key>(NAN);
  if (row < int64_t{p.tokens} * p.heads) {
    const int64_t token = row / p.heads;
    const bool owned = token >= p.cu_q_lens[0] && token < p.cu_q_lens[p.batch];
    for (int c = 0; c < kHeadDim && !owned; ++c) q[row * kHeadDim + c] = nan;
  }
  if (row < p.stored * p.heads) {
    const bool seen = is_seen(p, row / p.heads);
    for (int c = 0; c < kHeadDim && !seen; ++c) k[row * kHeadDim + c] = nan;
    const bool bad = bad_values && is_bad(seed, row / p.heads, static_cast<int32_t>(row % p.heads));
    const Value value = from_float<Value>(!seen || row % 2 == 0 ? NAN : INFINITY);
    for (int c = 0; c < kNope && (bad || !seen); ++c) v[p.v_offset + row * p.v_stride + c] = value;
  }
}

// Keys in parts, by a thread a row; all heads of a token get head 0's rope key.
template <class Key>
__global__ void part_keys_kernel(PrefillParams p, Key* k, Key* nope, Key* k_pe) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, token = row / p.heads;
  if (token >= p.stored) return;
  for (int c = 0; c < kNope; ++c) nope[row * p.k_stride + c] = k[row * kHeadDim + c];
  for (int c = 0; c < kRope; ++c) {
    const Key rope = k[token * p.heads * kHeadDim + kNope + c];
    if (row % p.heads == 0) {
      k_pe[p.k_pe_offset + token * p.k_pe_stride + c] = rope;
    } else {
      k[row * kHeadDim + kNope + c] = rope;
    }
  }
}

// By a thread for each byte of the tiles.
__global__ void tile_kernel(PrefillParams p, const E4M3FN* v, E4M3FN* tiles, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int position = static_cast<int>(i % kValueTile), key = position % 4 / 2 * 8 + position / 4 * 2 + position % 2;
  const int64_t row = i / kValueTile / kNope, token = row / p.heads * kValueTile + key, head = row % p.heads;
  const int64_t from = p.v_offset + (token * p.heads + head) * p.v_stride + i / kValueTile % kNope;
  tiles[i] = token < p.stored ? v[from] : E4M3FN{0};
}

enum class RowKind : int32_t { kCompared, kUntouched, kNotFinite };

// By one thread for each column of a row, a block a row.
template <class Key, class Value>
__global__ void __launch_bounds__(kNope)
    prefill_oracle_kernel(PrefillParams p, const float* carried_out, const float* carried_lse, float* out, float* lse,
                          RowKind* kinds) {
  __shared__ double scores[kNope];
  __shared__ float query[kHeadDim];
  const auto token = static_cast<int32_t>(blockIdx.x / p.heads), head = static_cast<int32_t>(blockIdx.x % p.heads);
  const int64_t row = blockIdx.x;
  const int column = threadIdx.x;
  int64_t begin = 0, end = 0;
  for (int32_t b = 0; b < p.batch; ++b) {
    if (token < p.cu_q_lens[b] || token >= p.cu_q_lens[b + 1]) continue;
    begin = p.cu_kv_lens[b];
    end = p.cu_kv_lens[b + 1];
    if (p.causal) end = min(end, end - p.cu_q_lens[b + 1] + token + 1);
  }
  for (int c = column; c < kHeadDim; c += kNope) {
    query[c] = to_float(static_cast<const Key*>(p.q)[row * kHeadDim + c]);
  }
  double scale = p.scale, highest = -INFINITY, total = 0, sum = 0;
  if (p.q_scale != nullptr) scale *= *p.q_scale;
  if (p.k_scale != nullptr) scale *= *p.k_scale;
  bool finite = true;
  for (int64_t first = begin; first < end; first += kNope) {
    __syncthreads();
    const int64_t own = first + column;
    double score = -INFINITY;
    if (own < end && is_seen(p, own)) {
      const Key* key = static_cast<const Key*>(p.k) + (own * p.heads + head) * kHeadDim;
      score = 0;
      for (int c = 0; c < kHeadDim; ++c) score += double{query[c]} * to_float(key[c]);
      score *= scale;
    }
    scores[column] = score;
    __syncthreads();
    double next = highest;
    for (int i = 0; i < kNope; ++i) next = fmax(next, scores[i]);
    if (next == -INFINITY) continue;
    const double factor = exp(highest - next);
    total *= factor;
    sum *= factor;
    highest = next;
    __syncthreads();
    scores[column] = score == -INFINITY ? -1 : exp(score - highest);  // -1: not seen
    __syncthreads();
    for (int i = 0; i < kNope; ++i) {
      const double weight = scores[i];
      if (weight < 0) continue;
      const auto* value = static_cast<const Value*>(p.v) + p.v_offset + ((first + i) * p.heads + head) * p.v_stride;
      const float x = to_float(value[column]);
      finite = finite && isfinite(x);
      total += weight;
      sum += weight * x;
    }
  }
  const bool empty = highest == -INFINITY;
  if (p.v_scale != nullptr) sum *= *p.v_scale;
  double expected = empty ? 0 : sum / total, expected_lse = empty ? -INFINITY : highest + log(total);
  if (p.merge && !empty && isfinite(carried_lse[row])) {
    const double carried = carried_lse[row], top = fmax(carried, expected_lse);
    const double a = exp(carried - top), b = exp(expected_lse - top);
    expected = (a * carried_out[row * kNope + column] + b * expected) / (a + b);
    expected_lse = top + log(a + b);
  }
  out[row * kNope + column] = static_cast<float>(expected);
  if (column == 0) {
    lse[row] = static_cast<float>(expected_lse);
    kinds[row] = p.merge && empty ? RowKind::kUntouched : finite ? RowKind::kCompared : RowKind::kNotFinite;
  }
}

// How much more of a score is lost than of one below 64, where lse is about a row's largest.
__device__ inline float loss_factor(float lse, float product_scale) {
  return product_scale > 0 ? exp2f(fmaxf(0, ceilf(log2f(fabsf(lse) / (64 * product_scale))))) : 1;
}

// errors[row] = {relative error of out, error of lse, absolute or of what may be lost}, by one warp; infinity where the
// row is not of its kind.
template <class Out>
__global__ void compare_prefill_kernel(const Out* out, const float* lse, const float* carried_out,
                                       const float* carried_lse, const float* expected_out, const float* expected_lse,
                                       const RowKind* kinds, int64_t rows, float product_scale, float2* errors) {
  const int64_t row = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  double difference = 0, norm = 0;
  bool same = __float_as_uint(lse[row]) == __float_as_uint(carried_lse == nullptr ? 0 : carried_lse[row]);
  bool finite = true;
  for (int c = lane; c < kNope; c += 32) {
    const float actual = to_float(out[row * kNope + c]), expected = expected_out[row * kNope + c];
    difference += (double{actual} - expected) * (double{actual} - expected);
    norm += double{expected} * expected;
    finite = finite && isfinite(actual);
    same = same && carried_out != nullptr && __float_as_uint(actual) == __float_as_uint(carried_out[row * kNope + c]);
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    difference += __shfl_xor_sync(0xFFFFFFFF, difference, distance);
    norm += __shfl_xor_sync(0xFFFFFFFF, norm, distance);
  }
  finite = __all_sync(0xFFFFFFFF, finite);
  same = __all_sync(0xFFFFFFFF, same);
  float2 error{INFINITY, INFINITY};
  const float lse_error = fabsf(lse[row] - expected_lse[row]) / loss_factor(expected_lse[row], product_scale);
  if (kinds[row] == RowKind::kUntouched) {
    if (same) error = {0, 0};
  } else if (kinds[row] == RowKind::kNotFinite) {
    if (!finite) error = {0, lse_error};
  } else if (expected_lse[row] == -INFINITY) {
    if (difference == 0 && lse[row] == -INFINITY) error = {0, 0};
  } else if (finite && isfinite(lse[row])) {
    error = {norm > 0 ? static_cast<float>(sqrt(difference / norm)) : 0, lse_error};
  }
  if (lane == 0) errors[row] = error;
}

// f(Key{}, Value{}) with the element types of queries and keys, and of values.
template <class F>
void with_elements(const PrefillVariant& variant, F f) {
  if (variant.tiled) return f(E4M3FN{}, E4M3FN{});
  with_element(variant.dtype, [&](auto key) {
    if constexpr (std::is_same_v<decltype(key), E4M3FN>) {
      f(key, __nv_bfloat16{});
    } else {
      f(key, key);
    }
  });
}

class PrefillCase {
 public:
  explicit PrefillCase(const PrefillShapes& shapes) : shapes_(shapes) {
    std::vector<int32_t> cu_q_lens{shapes.q_gap}, cu_kv_lens{shapes.kv_gap};
    for (int32_t n : shapes.q_lens) cu_q_lens.push_back(cu_q_lens.back() + n);
    for (int32_t n : shapes.kv_lens) cu_kv_lens.push_back(cu_kv_lens.back() + n);
    p_.tokens = cu_q_lens.back() + shapes.q_gap;
    p_.stored = cu_kv_lens.back() + shapes.kv_gap;
    p_.batch = static_cast<int32_t>(shapes.q_lens.size());
    p_.heads = shapes.heads;
    p_.scale = shapes.scale;
    p_.variant = shapes.variant.number;
    p_.causal = shapes.causal;
    p_.merge = shapes.merge;
    p_.dtype = shapes.variant.dtype;
    p_.v_dtype = shapes.variant.v_dtype;
    p_.v_tiled = shapes.variant.tiled;
    p_.out_dtype = shapes.merge ? DType::kF32 : shapes.variant.fp8() ? DType::kBF16 : p_.dtype;
    if (shapes.q_scale != 1) p_.q_scale = upload(q_scale_, {shapes.q_scale});
    if (shapes.k_scale != 1) p_.k_scale = upload(k_scale_, {shapes.k_scale});
    if (shapes.v_scale != 1) p_.v_scale = upload(v_scale_, {shapes.v_scale});
    p_.v_stride = shapes.whole_values ? 2 * kNope : kNope;
    p_.v_offset = shapes.whole_values ? kNope : 0;
    p_.cu_q_lens = upload(cu_q_lens_, cu_q_lens);
    p_.cu_kv_lens = upload(cu_kv_lens_, cu_kv_lens);
    if (shapes.key_mask) {
      std::vector<uint32_t> words((p_.stored + 31) / 32);
      for (size_t i = 0; i < words.size(); ++i) {
        const uint32_t bits = mix(shapes.seed * 31 + i);
        words[i] = bits % 4 == 0 ? mix(bits) : 0xFFFFFFFF;
      }
      p_.key_mask = upload(key_mask_, words);
    }
    with_elements(shapes.variant, [&](auto key, auto value) { make_arrays<decltype(key), decltype(value)>(); });
    const size_t rows = size_t(p_.tokens) * p_.heads + kGuardRows;
    out_ = Array<uint8_t>(rows * kNope * size_of(p_.out_dtype));
    lse_ = Array<float>(rows);
    p_.out = out_.data();
    p_.lse = lse_.data();
  }

  PrefillParams& params() { return p_; }

  void run() {
    out_.poison();
    lse_.poison();
    if (shapes_.merge) {
      const int64_t rows = int64_t{p_.tokens} * p_.heads;
      fill(static_cast<float*>(p_.out), rows * kNope, shapes_.seed + 4);
      std::vector<float> lse(rows);
      for (int64_t i = 0; i < rows; ++i) {
        const float kinds[] = {-INFINITY, INFINITY, NAN, 3 * noise(shapes_.seed + 5, i), noise(shapes_.seed + 6, i)};
        lse[i] = kinds[mix(shapes_.seed + i) % 5];
      }
      lse_.upload(lse);
      carried_out_ = out_.download();
      carried_lse_ = lse;
    }
    check(prefill(p_, device()));
  }

  // With whole keys, whatever the shapes say.
  void run_whole() {
    const PrefillParams given = p_;
    p_.k = k_.data();
    p_.k_pe = nullptr;
    p_.k_stride = kHeadDim;
    run();
    p_ = given;
  }

  std::vector<uint8_t> out() const { return out_.download(); }
  std::vector<float> lse() const { return lse_.download(); }

  // Nothing is written behind the results.
  void verify_guards() const {
    const int64_t rows = int64_t{p_.tokens} * p_.heads;
    const auto is_poison = [](const void* tail, size_t bytes) {
      std::vector<uint8_t> values(bytes);
      check(cudaMemcpyAsync(values.data(), tail, bytes, cudaMemcpyDeviceToHost, stream_of(device())));
      synchronize();
      return std::all_of(values.begin(), values.end(), [](uint8_t value) { return value == 0xFF; });
    };
    const size_t out_bytes = kNope * size_of(p_.out_dtype);
    require(is_poison(lse_.data() + rows, kGuardRows * sizeof(float)), "lse is written behind it: " + shapes_.text());
    require(is_poison(out_.data() + rows * out_bytes, kGuardRows * out_bytes),
            "out is written behind it: " + shapes_.text());
  }

  // The worst relative error of a row of out; ends the driver where something is wrong.
  double verify() {
    verify_guards();
    const int64_t rows = int64_t{p_.tokens} * p_.heads;
    if (rows == 0) return 0;
    Array<float> expected_out(rows * kNope), expected_lse(rows), carried_lse(carried_lse_);
    Array<uint8_t> carried_out(carried_out_);
    Array<RowKind> kinds(rows);
    Array<float2> errors(rows);
    const float* before_out = shapes_.merge ? reinterpret_cast<const float*>(carried_out.data()) : nullptr;
    const float* before_lse = shapes_.merge ? carried_lse.data() : nullptr;
    PrefillParams plain = p_;  // the oracle's keys are whole, and its values are not in tiles
    plain.k = k_.data();
    plain.v = v_.data();
    with_elements(shapes_.variant, [&](auto key, auto value) {
      LaunchShape shape;
      shape.grid = dim3(static_cast<unsigned>(rows));
      shape.block = dim3(kNope);
      check(launch("the oracle", (prefill_oracle_kernel<decltype(key), decltype(value)>), shape, device(), plain,
                   before_out, before_lse, expected_out.data(), expected_lse.data(), kinds.data()));
    });
    const auto compare = [&](auto element) {
      using Out = decltype(element);
      check(launch("the comparison", compare_prefill_kernel<Out>, grid_of(rows * 32), device(),
                   static_cast<const Out*>(p_.out), p_.lse, before_out, before_lse, expected_out.data(),
                   expected_lse.data(), kinds.data(), rows, static_cast<float>(shapes_.product_scale()),
                   errors.data()));
    };
    switch (p_.out_dtype) {
      case DType::kF32: compare(float{}); break;
      case DType::kF16: compare(__half{}); break;
      default: compare(__nv_bfloat16{});
    }
    const std::vector<float2> all = errors.download();
    double worst = 0;
    for (int64_t row = 0; row < rows; ++row) {
      require(all[row].x <= shapes_.out_tolerance() && all[row].y <= shapes_.lse_tolerance(),
              "token " + std::to_string(row / p_.heads) + ", head " + std::to_string(row % p_.heads) +
                  ": error of out " + std::to_string(all[row].x) + ", of lse " + std::to_string(all[row].y) + "; " +
                  shapes_.text());
      worst = std::max(worst, double{all[row].x});
    }
    return worst;
  }

 private:
  static constexpr int64_t kGuardRows = 64;

  template <class T>
  static const T* upload(Array<T>& target, const std::vector<T>& values) {
    target = Array<T>(values);
    return target.data();
  }

  template <class Key, class Value>
  void make_arrays() {
    const int64_t queries = int64_t{p_.tokens} * p_.heads, keys = p_.stored * p_.heads;
    const auto make = [&](auto element, Array<uint8_t>& target, int64_t count, uint64_t seed) {
      target = Array<uint8_t>(count * sizeof(element));
      auto* values = reinterpret_cast<decltype(element)*>(target.data());
      fill(values, count, seed);
      return values;
    };
    Key* q = make(Key{}, q_, queries * kHeadDim, shapes_.seed + 1);
    Key* k = make(Key{}, k_, keys * kHeadDim, shapes_.seed + 2);
    Value* v = make(Value{}, v_, keys * p_.v_stride, shapes_.seed + 3);
    p_.q = q;
    p_.k = k;
    p_.k_stride = kHeadDim;
    p_.v = v;
    const int64_t rows = std::max(queries, keys);
    if (rows > 0) {
      check(launch("spoiling", (spoil_kernel<Key, Value>), grid_of(rows), device(), p_, q, k, v, shapes_.bad_values,
                   shapes_.seed));
    }
    if (shapes_.nope_width != 0) part_keys(k, v);
    if (!shapes_.variant.tiled) return;
    const int64_t tiled = (p_.stored + kValueTile - 1) / kValueTile * kValueTile * p_.heads * kNope;
    tiles_ = Array<uint8_t>(tiled);
    p_.v = tiles_.data();
    if (tiled == 0) return;
    check(launch("tiling", tile_kernel, grid_of(tiled), device(), p_, reinterpret_cast<const E4M3FN*>(v_.data()),
                 reinterpret_cast<E4M3FN*>(tiles_.data()), tiled));
  }

  // Amid NaN, or in the up-projection beside the values where there is one.
  template <class Key, class Value>
  void part_keys(Key* k, Value* v) {
    const bool in_place = shapes_.nope_width == 2 * kNope && shapes_.whole_values;
    nope_ = Array<uint8_t>(in_place ? 0 : p_.stored * p_.heads * shapes_.nope_width * sizeof(Key));
    k_pe_ = Array<uint8_t>(p_.stored * shapes_.rope_width * sizeof(Key));
    nope_.poison();
    k_pe_.poison();
    auto* nope = in_place ? reinterpret_cast<Key*>(v) : reinterpret_cast<Key*>(nope_.data());
    auto* k_pe = reinterpret_cast<Key*>(k_pe_.data());
    p_.k = nope;
    p_.k_stride = shapes_.nope_width;
    p_.k_pe = k_pe;
    p_.k_pe_stride = shapes_.rope_width;
    p_.k_pe_offset = shapes_.rope_width - kRope;
    const int64_t keys = p_.stored * p_.heads;
    if (keys > 0) check(launch("parting", part_keys_kernel<Key>, grid_of(keys), device(), p_, k, nope, k_pe));
  }

  PrefillShapes shapes_;
  PrefillParams p_{};
  Array<uint8_t> q_, k_, nope_, k_pe_, v_, tiles_, out_;
  Array<float> lse_, q_scale_, k_scale_, v_scale_;
  Array<int32_t> cu_q_lens_, cu_kv_lens_;
  Array<uint32_t> key_mask_;
  std::vector<uint8_t> carried_out_;
  std::vector<float> carried_lse_;
};

}  // namespace mla::test
