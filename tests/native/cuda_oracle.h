// Decode from its definition, for all heads of a query token in one CTA; and the comparison with it. It shares no
// indexing with the kernels under test.
//
// Products are exact in fp32 (two factors of at most 11 bits each) and summed there 32 at a time, then in fp64: its
// error is some 1e-6 of the result's. oracle_group compares it with plain fp64 on the host.
#pragma once

#include "tests/native/cuda_support.h"

namespace mla::test {

constexpr int kOracleHeads = 8;  // of one token, a CTA; a warp each while it scores
constexpr int kOracleKeys = 32;  // at once; a lane each
constexpr int kOracleThreads = kOracleHeads * kOracleKeys;
constexpr int kOracleColumns = kLatent / kOracleThreads;  // of the output, a thread, for every head
constexpr int kOracleRun = 32;                            // products that are summed in fp32
constexpr int kOracleStride = kWidth + 4;                 // floats; lanes read 16 bytes of 32 rows without conflicts

struct OracleMemory {
  float queries[kOracleHeads][kOracleStride];
  float keys[kOracleKeys][kOracleStride];
  float weights[kOracleHeads][kOracleKeys];
  bool masked[kOracleKeys];
  double factor[kOracleHeads];  // of what was summed before this run of keys
  double total[kOracleHeads];
};

// What a token attends to: keys [0, keys) of a request, those of pages that exist.
struct OracleToken {
  int32_t request;  // -1: nothing
  int32_t keys;
};

__device__ inline OracleToken oracle_token(const DecodeParams& p, int32_t token) {
  const int32_t layer = p.layer ? *p.layer : 0;
  if (layer < 0 || layer >= p.layers) return {-1, 0};
  for (int32_t b = 0; b < p.batch; ++b) {
    const int32_t first = p.cu_q_lens ? p.cu_q_lens[b] : b * p.max_q_len;
    const int32_t last = p.cu_q_lens ? p.cu_q_lens[b + 1] : first + p.max_q_len;
    if (token < first || token >= last || token - first >= p.max_q_len) continue;
    int64_t keys = max(p.kv_lens[b], 0);
    if (p.causal) keys = max(keys - (last - first) + (token - first) + 1, int64_t{0});
    return {b, static_cast<int32_t>(min(keys, int64_t{p.max_pages} * p.page_size))};
  }
  return {-1, 0};
}

template <class Query, class Key>
__global__ void __launch_bounds__(kOracleThreads) oracle_kernel(DecodeParams p, float* out, float* lse) {
  extern __shared__ __align__(16) unsigned char oracle_shared[];
  auto& shared = *reinterpret_cast<OracleMemory*>(oracle_shared);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const auto token = static_cast<int32_t>(blockIdx.x);
  const int32_t first_head = blockIdx.y * kOracleHeads, heads = min(kOracleHeads, p.heads - first_head);
  const OracleToken visible = oracle_token(p, token);
  const int32_t layer = visible.request >= 0 && p.layer ? *p.layer : 0;
  const auto* cache = static_cast<const Key*>(p.cache) + layer * p.pages * p.page_size * kWidth;
  const double k_scale = p.k_scale ? p.k_scale[p.k_scales > 1 ? layer : 0] : 1.0f;
  const double scale = double{p.scale} * k_scale * (p.q_scale ? *p.q_scale : 1.0f);

  for (int i = thread; i < kOracleHeads * kWidth; i += kOracleThreads) {
    const int head = i / kWidth, column = i % kWidth;
    const int64_t row = int64_t{token} * p.heads + first_head + head;
    float value = 0;
    if (head < heads) {
      const auto* latent = static_cast<const Query*>(p.q_latent) + row * p.q_latent_stride;
      const auto* rope = static_cast<const Query*>(p.q_rope) + row * p.q_rope_stride;
      value = to_float(column < kLatent ? latent[column] : rope[column - kLatent]);
    }
    shared.queries[head][column] = value;
  }

  double highest = -INFINITY, total = 0;  // of the warp's head
  double sum[kOracleHeads][kOracleColumns] = {};
  for (int32_t begin = 0; begin < visible.keys; begin += kOracleKeys) {
    __syncthreads();
    for (int n = warp; n < kOracleKeys; n += kOracleHeads) {
      const int32_t j = begin + n;
      const int64_t page =
          j < visible.keys ? p.page_table[int64_t{visible.request} * p.max_pages + j / p.page_size] : -1;
      const bool exists = page >= 0 && page < p.pages;
      const Key* key = cache + (exists ? (page * p.page_size + j % p.page_size) * kWidth : 0);
      for (int c = lane; c < kWidth; c += 32) shared.keys[n][c] = exists ? to_float(key[c]) : 0.0f;
      if (lane == 0) shared.masked[n] = !exists;
    }
    __syncthreads();

    const bool masked = shared.masked[lane];
    double score = 0;
    for (int run = 0; run < kWidth; run += kOracleRun) {
      float part = 0;
#pragma unroll
      for (int c = run; c < run + kOracleRun; c += 4) {
        const float4 q = *reinterpret_cast<const float4*>(&shared.queries[warp][c]);
        const float4 k = *reinterpret_cast<const float4*>(&shared.keys[lane][c]);
        part += q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w;
      }
      score += double{part};
    }
    score = masked ? -INFINITY : score * scale;
    double next = fmax(highest, score);
    for (int distance = 16; distance > 0; distance /= 2) {
      next = fmax(next, __shfl_xor_sync(0xFFFFFFFF, next, distance));
    }
    const double weight = masked ? 0 : exp(score - next);
    const double factor = highest == next ? 1 : exp(highest - next);
    double weights = weight;
    for (int distance = 16; distance > 0; distance /= 2) weights += __shfl_xor_sync(0xFFFFFFFF, weights, distance);
    total = total * factor + weights;
    highest = next;
    shared.weights[warp][lane] = static_cast<float>(weight);
    if (lane == 0) shared.factor[warp] = factor;
    __syncthreads();

    float part[kOracleHeads][kOracleColumns] = {};
    for (int n = 0; n < kOracleKeys; ++n) {
#pragma unroll
      for (int c = 0; c < kOracleColumns; ++c) {
        const float value = shared.keys[n][c * kOracleThreads + thread];
#pragma unroll
        for (int head = 0; head < kOracleHeads; ++head) part[head][c] += shared.weights[head][n] * value;
      }
    }
#pragma unroll
    for (int head = 0; head < kOracleHeads; ++head) {
#pragma unroll
      for (int c = 0; c < kOracleColumns; ++c) {
        sum[head][c] = sum[head][c] * shared.factor[head] + double{part[head][c]};
      }
    }
  }

  if (lane == 0) shared.total[warp] = total;
  __syncthreads();
  const int64_t first_row = int64_t{token} * p.heads + first_head;
#pragma unroll
  for (int head = 0; head < kOracleHeads; ++head) {
    if (head >= heads) break;
    const double all = shared.total[head];
#pragma unroll
    for (int c = 0; c < kOracleColumns; ++c) {
      const double value = all == 0 ? 0 : sum[head][c] * k_scale / all;
      out[(first_row + head) * kLatent + c * kOracleThreads + thread] = static_cast<float>(value);
    }
  }
  if (lane == 0 && warp < heads) {
    lse[first_row + warp] = total == 0 ? -INFINITY : static_cast<float>(highest + log(total));
  }
}

struct OracleResult {
  Array<float> out;  // [T * H, L]
  Array<float> lse;  // [T * H]
};

inline OracleResult run_oracle(const DecodeParams& p) {
  const int64_t rows = int64_t{p.tokens} * p.heads;
  OracleResult result{Array<float>(rows * kLatent), Array<float>(rows)};
  LaunchShape shape;
  shape.grid = dim3(p.tokens, (p.heads + kOracleHeads - 1) / kOracleHeads);
  shape.block = dim3(kOracleThreads);
  shape.shared_bytes = sizeof(OracleMemory);
  with_element(p.q_dtype, [&](auto query) {
    with_element(p.cache_dtype, [&](auto key) {
      using Query = decltype(query);
      using Key = decltype(key);
      if constexpr (std::is_same_v<Query, Key> || std::is_same_v<Key, E4M3FN>) {
        check(
            launch("the oracle", oracle_kernel<Query, Key>, shape, device(), p, result.out.data(), result.lse.data()));
      } else {
        require(false, "the oracle takes queries of the cache's dtype, or an e4m3fn cache");
      }
    });
  });
  return result;
}

// errors[row] = {relative error of out, absolute error of lse}, by one warp. Infinitely wrong is what is not finite,
// not exactly empty where an empty row is due, or not NaN in every column where the row saw a NaN.
template <class Element>
__global__ void compare_kernel(const Element* out, const float* lse, const float* expected_out,
                               const float* expected_lse, int64_t rows, float2* errors) {
  const int64_t row = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  double difference = 0, norm = 0;
  bool all_nan = isnan(lse[row]);
  for (int c = lane; c < kLatent; c += 32) {
    const float actual = to_float(out[row * kLatent + c]), expected = expected_out[row * kLatent + c];
    difference += (double{actual} - expected) * (double{actual} - expected);
    norm += double{expected} * expected;
    all_nan = all_nan && isnan(actual);
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    difference += __shfl_xor_sync(0xFFFFFFFF, difference, distance);
    norm += __shfl_xor_sync(0xFFFFFFFF, norm, distance);
  }
  all_nan = __all_sync(0xFFFFFFFF, all_nan);
  float2 error{INFINITY, INFINITY};
  if (isnan(expected_lse[row])) {
    if (all_nan) error = {0, 0};
  } else if (expected_lse[row] == -INFINITY) {
    if (difference == 0) error.x = 0;
    if (lse[row] == -INFINITY) error.y = 0;
  } else if (isfinite(difference) && isfinite(lse[row])) {
    const double relative = norm > 0 ? sqrt(difference / norm) : difference == 0 ? 0.0 : double{INFINITY};
    error = {static_cast<float>(relative), fabsf(lse[row] - expected_lse[row])};
  }
  if (lane == 0) errors[row] = error;
}

struct Errors {
  double out = 0, lse = 0;
  int64_t worst_row = -1;
};

inline Errors compare_with_oracle(const DecodeParams& p) {
  const int64_t rows = int64_t{p.tokens} * p.heads;
  if (rows == 0) return {};
  const OracleResult expected = run_oracle(p);
  Array<float2> errors(rows);
  with_element(p.out_dtype, [&](auto element) {
    using Element = decltype(element);
    check(launch("the comparison", compare_kernel<Element>, grid_of(rows * 32), device(),
                 static_cast<const Element*>(p.out), p.lse, expected.out.data(), expected.lse.data(), rows,
                 errors.data()));
  });
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
