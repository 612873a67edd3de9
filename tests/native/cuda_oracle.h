// Decode the slow way, in double precision, one CTA a (token, head) row; and the comparison with it. Written from the
// definition, and sharing no indexing with the kernels under test.
#pragma once

#include "tests/native/cuda_support.h"

namespace mla::test {

constexpr int kOracleThreads = 128;

template <class Element>
__global__ void oracle_kernel(DecodeParams p, double* all_scores, float* out, float* lse) {
  __shared__ double partial[kOracleThreads];
  const int64_t row = blockIdx.x;
  double* scores = all_scores + row * p.max_pages * p.page_size;
  const int32_t token = static_cast<int32_t>(row / p.heads), thread = threadIdx.x;

  int32_t request = -1, query = 0, queries = p.max_q_len;
  for (int32_t b = 0; b < p.batch; ++b) {
    const int32_t first = p.cu_q_lens ? p.cu_q_lens[b] : b * p.max_q_len;
    const int32_t last = p.cu_q_lens ? p.cu_q_lens[b + 1] : first + p.max_q_len;
    if (token < first || token >= last) continue;
    request = b;
    query = token - first;
    queries = last - first;
  }
  const int32_t layer = p.layer ? *p.layer : 0;
  const bool empty = request < 0 || query >= p.max_q_len || layer < 0 || layer >= p.layers;
  const int32_t kv_len = empty || p.kv_lens[request] < 0 ? 0 : p.kv_lens[request];
  const int32_t keys = static_cast<int32_t>(min(int64_t{kv_len}, int64_t{p.max_pages} * p.page_size));
  const auto* q_latent = static_cast<const Element*>(p.q_latent) + row * p.q_latent_stride;
  const auto* q_rope = static_cast<const Element*>(p.q_rope) + row * p.q_rope_stride;
  const auto* cache = static_cast<const Element*>(p.cache) + (empty ? 0 : layer) * p.pages * p.page_size * kWidth;

  double highest = -INFINITY;
  for (int32_t j = thread; j < keys; j += kOracleThreads) {
    const int64_t page = p.page_table[int64_t{request} * p.max_pages + j / p.page_size];
    const bool visible = page >= 0 && page < p.pages && (!p.causal || j <= int64_t{kv_len} - queries + query);
    scores[j] = -INFINITY;
    if (!visible) continue;
    const Element* key = cache + (page * p.page_size + j % p.page_size) * kWidth;
    double sum = 0;
    for (int c = 0; c < kLatent; ++c) sum += double{to_float(q_latent[c])} * double{to_float(key[c])};
    for (int c = 0; c < kRope; ++c) sum += double{to_float(q_rope[c])} * double{to_float(key[kLatent + c])};
    scores[j] = sum * p.scale;
    highest = max(highest, scores[j]);
  }
  partial[thread] = highest;
  __syncthreads();
  for (int i = 0; i < kOracleThreads; ++i) highest = max(highest, partial[i]);

  double total = 0, sum[kLatent / kOracleThreads] = {};
  for (int32_t j = 0; j < keys; ++j) {
    if (scores[j] == -INFINITY) continue;
    const double weight = exp(scores[j] - highest);
    total += weight;
    const int64_t page = p.page_table[int64_t{request} * p.max_pages + j / p.page_size];
    const Element* value = cache + (page * p.page_size + j % p.page_size) * kWidth;
    for (int c = thread; c < kLatent; c += kOracleThreads) {
      sum[c / kOracleThreads] += weight * double{to_float(value[c])};
    }
  }
  for (int c = thread; c < kLatent; c += kOracleThreads) {
    out[row * kLatent + c] = total == 0 ? 0.0f : static_cast<float>(sum[c / kOracleThreads] / total);
  }
  if (thread == 0) lse[row] = total == 0 ? -INFINITY : static_cast<float>(highest + log(total));
}

// errors[row] = {relative error of out, absolute error of lse}; anything not finite, or not exactly empty where an
// empty row is due, is infinitely wrong.
template <class Element>
__global__ void compare_kernel(const Element* out, const float* lse, const float* expected_out,
                               const float* expected_lse, int64_t rows, float2* errors) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  double difference = 0, norm = 0;
  for (int c = 0; c < kLatent; ++c) {
    const double actual = to_float(out[row * kLatent + c]), expected = expected_out[row * kLatent + c];
    difference += (actual - expected) * (actual - expected);
    norm += expected * expected;
  }
  float2 error{INFINITY, INFINITY};
  if (expected_lse[row] == -INFINITY) {
    if (difference == 0) error.x = 0;
    if (lse[row] == -INFINITY) error.y = 0;
  } else if (isfinite(difference) && isfinite(lse[row])) {
    error = {static_cast<float>(sqrt(difference / norm)), fabsf(lse[row] - expected_lse[row])};
  }
  errors[row] = error;
}

struct Errors {
  double out = 0, lse = 0;
  int64_t worst_row = -1;
};

template <class Element>
Errors compare_with_oracle(const DecodeParams& p) {
  const int64_t rows = int64_t{p.tokens} * p.heads;
  if (rows == 0) return {};
  Array<double> scores(rows * p.max_pages * p.page_size);
  Array<float> out(rows * kLatent), lse(rows);
  Array<float2> errors(rows);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(rows));
  shape.block = dim3(kOracleThreads);
  check(launch("the oracle", oracle_kernel<Element>, shape, device(), p, scores.data(), out.data(), lse.data()));
  check(launch("the comparison", compare_kernel<Element>, grid_of(rows), device(), static_cast<const Element*>(p.out),
               p.lse, out.data(), lse.data(), rows, errors.data()));
  Errors worst;
  const std::vector<float2> all = errors.download();
  for (int64_t row = 0; row < rows; ++row) {
    if (all[row].x > worst.out || all[row].y > worst.lse) worst.worst_row = row;
    if (all[row].x > worst.out) worst.out = all[row].x;
    if (all[row].y > worst.lse) worst.lse = all[row].y;
  }
  return worst;
}

}  // namespace mla::test
