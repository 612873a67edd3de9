// Decode in plain fp64 on the host, loop by loop from the definition: what the device's oracle is held against.
#pragma once

#include "tests/native/cuda_support.h"

namespace mla::test {

struct HostResult {
  std::vector<double> out;  // [T * H, L]
  std::vector<double> lse;  // [T * H]
};

// `count` elements of a dtype from the device, as fp64. Codes are decoded by the formats' definition.
inline std::vector<double> download_as_double(const void* data, int64_t count, DType dtype) {
  std::vector<uint8_t> bytes(count * size_of(dtype));
  check(cudaMemcpyAsync(bytes.data(), data, bytes.size(), cudaMemcpyDeviceToHost, stream_of(device())));
  synchronize();
  std::vector<double> values(count);
  for (int64_t i = 0; i < count; ++i) {
    uint32_t code = 0;
    std::memcpy(&code, bytes.data() + i * size_of(dtype), size_of(dtype));
    const int mantissa_bits = dtype == DType::kBF16 ? 7 : dtype == DType::kF16 ? 10 : 3;
    const int exponent_bits = dtype == DType::kBF16 ? 8 : dtype == DType::kF16 ? 5 : 4;
    const int bias = (1 << (exponent_bits - 1)) - 1, last_exponent = (1 << exponent_bits) - 1;
    const int mantissa = static_cast<int>(code & ((1u << mantissa_bits) - 1));
    const int exponent = static_cast<int>(code >> mantissa_bits) & last_exponent;
    const double sign = code >> (mantissa_bits + exponent_bits) ? -1 : 1;
    const bool nan = dtype == DType::kE4M3FN ? exponent == last_exponent && mantissa == 7 : exponent == last_exponent;
    const int significand = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
    values[i] = nan ? NAN : sign * std::ldexp(significand, std::max(exponent, 1) - bias - mantissa_bits);
  }
  return values;
}

template <class T>
std::vector<T> download_from(const T* data, int64_t count) {
  std::vector<T> values(data == nullptr ? 0 : count);
  if (data == nullptr) return values;
  check(cudaMemcpyAsync(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost, stream_of(device())));
  synchronize();
  return values;
}

// Uniform queries in one array alone, pages in range.
inline HostResult decode_on_host(const DecodeParams& p) {
  const int64_t rows = int64_t{p.tokens} * p.heads, page_elements = int64_t{p.page_size} * kWidth;
  const auto q = download_as_double(p.q_latent, rows * kWidth, p.q_dtype);
  const auto cache = download_as_double(p.cache, p.layers * p.pages * page_elements, p.cache_dtype);
  const auto page_table = download_from(p.page_table, int64_t{p.batch} * p.max_pages);
  const auto kv_lens = download_from(p.kv_lens, p.batch);
  const auto layer = download_from(p.layer, 1);
  const auto q_scale = download_from(p.q_scale, 1), k_scale = download_from(p.k_scale, p.k_scales);
  const int32_t l = layer.empty() ? 0 : layer[0];
  const double key_factor = k_scale.empty() ? 1 : k_scale[p.k_scales > 1 ? l : 0];
  const double factor = p.scale * key_factor * (q_scale.empty() ? 1 : double{q_scale[0]});
  HostResult result{std::vector<double>(rows * kLatent, 0), std::vector<double>(rows, -INFINITY)};
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = row / p.heads, request = token / p.max_q_len, query = token % p.max_q_len;
    const int64_t keys = p.causal ? int64_t{kv_lens[request]} - p.max_q_len + query + 1 : kv_lens[request];
    std::vector<double> scores;
    const auto key_of = [&](int64_t j) {
      const int64_t page = page_table[request * p.max_pages + j / p.page_size];
      return cache.data() + (l * p.pages + page) * page_elements + j % p.page_size * kWidth;
    };
    double highest = -INFINITY, total = 0;
    for (int64_t j = 0; j < keys; ++j) {
      double score = 0;
      for (int c = 0; c < kWidth; ++c) score += q[row * kWidth + c] * key_of(j)[c];
      scores.push_back(score * factor);
      highest = std::max(highest, scores.back());
    }
    for (double score : scores) total += std::exp(score - highest);
    if (total == 0) continue;
    result.lse[row] = highest + std::log(total);
    for (int64_t j = 0; j < keys; ++j) {
      const double weight = std::exp(scores[j] - highest) / total * key_factor;
      for (int c = 0; c < kLatent; ++c) result.out[row * kLatent + c] += weight * key_of(j)[c];
    }
  }
  return result;
}

}  // namespace mla::test
