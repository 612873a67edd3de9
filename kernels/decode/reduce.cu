// The reduction of decode: for each (token, head) row, the partials of its tile merged in the order of their keys.
#include "kernels/decode/reduce.h"

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/decode/plan_rule.h"

namespace mla {
namespace {

constexpr int kColumns = 4;                   // of the output, a thread: 16 bytes of a partial
constexpr int kThreads = kLatent / kColumns;  // one row at a time
constexpr int kLoads = 8;                     // partials on their way at once
constexpr int kMaxRows = 32;                  // a CTA, so that a warp finds all its rows at once
constexpr float kLog2E = 1.4426950408889634f;
constexpr uint32_t kWholeWarp = 0xFFFFFFFF;

// Where a row's result is: partials [first, first + count), `local_row` of each. count 0: an empty row, 1: written.
struct RowSplits {
  int32_t first;
  int32_t count;
  int32_t local_row;
};

// The last request that starts at or before `token`, or -1.
__device__ int32_t request_of(const int32_t* cu_q_lens, int32_t batch, int32_t token) {
  int32_t below = -1, above = batch;
  while (above - below > 1) {
    const int32_t middle = below + (above - below) / 2;
    if (cu_q_lens[middle] <= token)
      below = middle;
    else
      above = middle;
  }
  return below;
}

__device__ RowSplits find_splits(const DecodeParams& p, int64_t row) {
  constexpr RowSplits kEmpty{0, 0, 0};
  if (p.layer != nullptr && (*p.layer < 0 || *p.layer >= p.layers)) return kEmpty;
  const auto token = static_cast<int32_t>(row / p.heads), head = static_cast<int32_t>(row % p.heads);
  int32_t request, query;
  if (p.cu_q_lens == nullptr) {
    request = token / p.max_q_len;
    query = token % p.max_q_len;
  } else {
    request = request_of(p.cu_q_lens, p.batch, token);
    if (request < 0 || token >= p.cu_q_lens[request + 1]) return kEmpty;
    // Not negative, and an overflow of garbage shows as a negative number.
    query = static_cast<int32_t>(static_cast<uint32_t>(token) - static_cast<uint32_t>(p.cu_q_lens[request]));
  }
  if (request >= p.batch || query < 0 || query >= p.max_q_len) return kEmpty;
  const int64_t request_row = int64_t{query} * p.heads + head;
  const int64_t row_tile = request_row / p.plan.tile_rows;
  if (row_tile >= p.plan.row_tiles) return kEmpty;
  const TileSplits splits = p.plan.tile_splits[request * int64_t{p.plan.row_tiles} + row_tile];
  if (splits.count <= 0) return kEmpty;
  if (splits.count == 1) return {0, 1, 0};
  const int32_t first = min_of(max_of(splits.first_partial, 0), p.plan.max_partials);  // a plan may hold anything
  const int32_t count = min_of(splits.count, p.plan.max_partials - first);
  return {first, count, static_cast<int32_t>(request_row % p.plan.tile_rows)};
}

// All threads of the CTA, which own the row's columns; lanes share the weights of 32 partials.
template <class Element>
__device__ void merge_row(const DecodeParams& p, int64_t row, const RowSplits& splits) {
  const int thread = threadIdx.x, lane = thread % 32;
  const int64_t first = int64_t{splits.first} * p.plan.tile_rows + splits.local_row;  // row of the partials
  const float* lses = p.partial_lse + first;
  const float* outs = p.partial_out + first * kLatent + thread * kColumns;

  float highest = -INFINITY;
  for (int32_t i = lane; i < splits.count; i += 32) highest = fmaxf(highest, lses[int64_t{i} * p.plan.tile_rows]);
  for (int distance = 16; distance > 0; distance /= 2) {
    highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, distance));
  }

  float total = 0;
  float sum[kColumns] = {};
  for (int32_t base = 0; base < splits.count; base += 32) {
    const float lse = base + lane < splits.count ? lses[int64_t{base + lane} * p.plan.tile_rows] : -INFINITY;
    const float lane_weight = lse == -INFINITY ? 0.0f : exp2f((lse - highest) * kLog2E);
    float chunk_total = lane_weight;
    for (int distance = 16; distance > 0; distance /= 2) {
      chunk_total += __shfl_xor_sync(kWholeWarp, chunk_total, distance);
    }
    total += chunk_total;
    for (int32_t i = 0; i < 32 && base + i < splits.count; i += kLoads) {
      float weight[kLoads];
      float4 values[kLoads];
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        weight[k] = __shfl_sync(kWholeWarp, lane_weight, i + k);
        values[k] = float4{};
        // A piece without visible keys is not read. (A NaN weight is not 0, and shows.)
        if (weight[k] != 0) {
          values[k] = *reinterpret_cast<const float4*>(outs + int64_t{base + i + k} * p.plan.tile_rows * kLatent);
        }
      }
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        sum[0] += weight[k] * values[k].x;
        sum[1] += weight[k] * values[k].y;
        sum[2] += weight[k] * values[k].z;
        sum[3] += weight[k] * values[k].w;
      }
    }
  }

  const bool empty = total == 0;
  const float inverse = empty ? 0.0f : 1.0f / total;
  const uint2 packed{pack<Element>(sum[0] * inverse, sum[1] * inverse),
                     pack<Element>(sum[2] * inverse, sum[3] * inverse)};
  reinterpret_cast<uint2*>(static_cast<Element*>(p.out) + row * kLatent)[thread] = packed;
  if (thread == 0) p.lse[row] = empty ? -INFINITY : highest + logf(total);
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const __grid_constant__ DecodeParams p, int32_t rows_per_cta) {
  __shared__ RowSplits splits[kMaxRows];
  const int64_t rows = int64_t{p.tokens} * p.heads;
  const int64_t first = int64_t{blockIdx.x} * rows_per_cta;
  const int thread = threadIdx.x;
  // The plan was complete before decode's kernel started; its partials are what has to be waited for.
  if (thread < rows_per_cta && first + thread < rows) splits[thread] = find_splits(p, first + thread);
  ptx::wait_for_previous_kernel();
  __syncthreads();
  for (int i = 0; i < rows_per_cta && first + i < rows; ++i) {
    if (splits[i].count != 1) merge_row<Element>(p, first + i, splits[i]);
  }
}

}  // namespace

Error reduce(const DecodeParams& params, const Device& device, bool dependent) {
  const int64_t rows = int64_t{params.tokens} * params.heads;
  int32_t multiprocessors = 0;
  Error error = device_attribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (!error.empty()) return error;
  // Enough CTAs to fill the device; where there are more rows, each takes several, since most are already written.
  const int64_t spread = (rows + int64_t{multiprocessors} * 8 - 1) / (int64_t{multiprocessors} * 8);
  const auto rows_per_cta = static_cast<int32_t>(spread < 1 ? 1 : spread > kMaxRows ? kMaxRows : spread);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>((rows + rows_per_cta - 1) / rows_per_cta));
  shape.block = dim3(kThreads);
  shape.dependent = dependent;
  switch (params.out_dtype) {
    case DType::kBF16:
      return launch("the reduction of mla_decode", reduce_kernel<__nv_bfloat16>, shape, device, params, rows_per_cta);
    case DType::kF16:
      return launch("the reduction of mla_decode", reduce_kernel<__half>, shape, device, params, rows_per_cta);
    default: return std::string("jax_mla: mla_decode on CUDA cannot write ") + name_of(params.out_dtype);
  }
}

}  // namespace mla
