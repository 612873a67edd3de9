// The reduction of decode: for each (token, head) row, the partials of its tile merged in the order of their keys.
#include "kernels/decode/reduce.h"

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/decode/plan_rule.h"

namespace mla {
namespace {

constexpr int kThreads = 128;  // a CTA of them, of 64 registers, fits beside one of the attention kernels
constexpr int kWarps = kThreads / 32;
constexpr int kColumns = 4;        // of a partial, a load: 16 bytes
constexpr int kLoads = 8;          // of a thread, on their way at once
constexpr int kSliceColumns = 32;  // the least that a unit of work is
constexpr int kSlices = kLatent / kSliceColumns;
constexpr int kMaxRows = 32;  // that a CTA looks up at once
constexpr int kCtas = 8;      // a multiprocessor
constexpr float kLog2E = 1.4426950408889634f;

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
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
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
  if (splits.count <= 0 || layer < 0 || layer >= p.layers) return kEmpty;
  if (splits.count == 1) return {0, 1, 0};
  const int32_t first = min_of(max_of(splits.first_partial, 0), p.plan.max_partials);  // a plan may hold anything
  const int32_t count = min_of(splits.count, p.plan.max_partials - first);
  return {first, count, static_cast<int32_t>(request_row % p.plan.tile_rows)};
}

// The splits of a row that a thread has seen, in its columns: kGroups times four, a warp's width apart.
template <int kGroups>
struct Sum {
  float highest = -INFINITY;  // lse
  float total = 0;            // of exp(lse - highest)
  float4 values[kGroups] = {};

  __device__ void scale(float factor) {
    total *= factor;
#pragma unroll
    for (float4& v : values) v = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
  }
};

__device__ __forceinline__ void add_scaled(float4& sum, const float4& value, float weight) {
  sum.x += weight * value.x;
  sum.y += weight * value.y;
  sum.z += weight * value.z;
  sum.w += weight * value.w;
}

// Of a sum with this `highest`, beside a higher one. A NaN shows: it is neither -inf nor 0.
__device__ __forceinline__ float weight_of(float lse, float highest) {
  return lse == -INFINITY ? 0.0f : exp2f((lse - highest) * kLog2E);
}

// Adds the splits first, first + step, .. below splits.count; with several groups there are at most kLoads / kGroups.
// Loads do not wait for the weights of what they load.
template <int kGroups>
__device__ __forceinline__ Sum<kGroups> add_splits(const DecodeParams& p, const RowSplits& splits, int32_t first,
                                                   int32_t step, int column) {
  constexpr int kBatch = kLoads / kGroups;
  const int64_t first_row = int64_t{splits.first} * p.plan.tile_rows + splits.local_row;
  const float* lses = p.partial_lse + first_row;
  const float* outs = p.partial_out + first_row * kLatent + column;
  Sum<kGroups> sum;
  if (first >= splits.count) return sum;
  int32_t base = first;
  do {
    float lse[kBatch];
    float4 values[kBatch][kGroups];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int32_t split = base + k * step;
      const bool exists = split < splits.count;
      const int64_t row = int64_t{split} * p.plan.tile_rows;
      lse[k] = exists ? __ldcg(lses + row) : -INFINITY;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const auto* value = reinterpret_cast<const float4*>(outs + row * kLatent + group * 32 * kColumns);
        values[k][group] = exists ? __ldcg(value) : float4{};
      }
    }
    float highest = sum.highest;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) highest = fmaxf(highest, lse[k]);
    if (kGroups == 1) sum.scale(weight_of(sum.highest, highest));
    sum.highest = highest;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const float weight = weight_of(lse[k], highest);
      sum.total += weight;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        // A piece without visible keys may hold anything.
        if (weight != 0) add_scaled(sum.values[group], values[k][group], weight);
      }
    }
    base += step * kBatch;
  } while (kGroups == 1 && base < splits.count);
  return sum;
}

template <class Element, int kGroups>
__device__ __forceinline__ void store_row(const DecodeParams& p, int64_t row, int column, const Sum<kGroups>& sum) {
  const bool empty = sum.total == 0;
  const float inverse = empty ? 0.0f : 1.0f / sum.total;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const float4& v = sum.values[group];
    const uint2 packed{pack<Element>(v.x * inverse, v.y * inverse), pack<Element>(v.z * inverse, v.w * inverse)};
    auto* out = static_cast<Element*>(p.out) + row * kLatent + column + group * 32 * kColumns;
    *reinterpret_cast<uint2*>(out) = packed;
  }
  if (column == 0) p.lse[row] = empty ? -INFINITY : sum.highest + logf(sum.total);
}

// A warp alone, for few splits: as many columns as its loads reach.
template <class Element, int kGroups>
__device__ __forceinline__ void merge_by_warp(const DecodeParams& p, int64_t row, const RowSplits& splits, int slice) {
  const int column = slice * kSliceColumns + threadIdx.x % 32 * kColumns;
  store_row<Element>(p, row, column, add_splits<kGroups>(p, splits, 0, 1, column));
}

struct Shared {
  RowSplits splits[kMaxRows];
  float4 values[kThreads];
  float2 sums[kThreads / 8];  // highest and total of a stream
};

// All threads, for many: kLanes of them are a stream, which takes every so-manieth split.
template <class Element, int kLanes>
__device__ __forceinline__ void merge_by_cta(const DecodeParams& p, int64_t row, const RowSplits& splits, int slice,
                                             Shared& shared) {
  constexpr int kStreams = kThreads / kLanes;
  const int stream = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int column = slice * kSliceColumns + lane * kColumns;
  const Sum<1> own = add_splits<1>(p, splits, stream, kStreams, column);
  __syncthreads();  // what was here has been read
  shared.values[threadIdx.x] = own.values[0];
  if (lane == 0) shared.sums[stream] = make_float2(own.highest, own.total);
  __syncthreads();
  if (stream != 0) return;
  Sum<1> sum;
#pragma unroll
  for (int i = 0; i < kStreams; ++i) sum.highest = fmaxf(sum.highest, shared.sums[i].x);
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    const float2 other = shared.sums[i];
    const float weight = other.y == 0 ? 0.0f : exp2f((other.x - sum.highest) * kLog2E);
    sum.total += weight * other.y;
    add_scaled(sum.values[0], shared.values[i * kLanes + lane], weight);
  }
  store_row<Element>(p, row, column, sum);
}

// Slices of a row that are merged as one. How follows from the row's splits alone, and so do the bits.
__device__ __forceinline__ int slices_at_once(int32_t splits) {
  return splits <= 2 ? 16 : splits <= 4 ? 8 : splits <= 32 ? 4 : splits <= 64 ? 2 : 1;
}

template <class Element>
__device__ __forceinline__ void merge_slices(const DecodeParams& p, int64_t row, const RowSplits& splits, int slice,
                                             bool own_turn, Shared& shared) {
  if (splits.count <= kLoads) {
    if (!own_turn) return;
    if (splits.count <= 2) {
      merge_by_warp<Element, 4>(p, row, splits, slice);
    } else if (splits.count <= 4) {
      merge_by_warp<Element, 2>(p, row, splits, slice);
    } else {
      merge_by_warp<Element, 1>(p, row, splits, slice);
    }
  } else if (splits.count <= 32) {
    merge_by_cta<Element, 32>(p, row, splits, slice, shared);
  } else if (splits.count <= 64) {
    merge_by_cta<Element, 16>(p, row, splits, slice, shared);
  } else {
    merge_by_cta<Element, 8>(p, row, splits, slice, shared);
  }
}

// A CTA has the slices [blockIdx.x * slices_a_cta, ...) of all rows; it merges what begins there.
template <class Element>
__global__ void __launch_bounds__(kThreads, kCtas)
    reduce_kernel(const __grid_constant__ DecodeParams p, int32_t slices_a_cta) {
  __shared__ Shared shared;
  // Slices from here on are counted from the first row that the CTA has a part of.
  const int64_t first_slice = int64_t{blockIdx.x} * slices_a_cta;
  const int64_t first_row = first_slice / kSlices;
  const int64_t slices_left = int64_t{p.tokens} * p.heads * kSlices - first_slice;
  const auto first = static_cast<int32_t>(first_slice % kSlices);
  const int32_t last = first + static_cast<int32_t>(min_of(int64_t{slices_a_cta}, slices_left));
  const int thread = threadIdx.x, warp = thread / 32;
  bool waited = false;
  int turn = 0;
  for (int32_t row = 0; row * kSlices < last; ++row) {
    const int32_t in_shared = row % kMaxRows;
    if (in_shared == 0) {
      // The plan was complete before the attention kernel started; its partials are what has to be waited for.
      bool work = false;
      __syncthreads();
      if (thread < kMaxRows && (row + thread) * kSlices < last) {
        shared.splits[thread] = find_splits(p, first_row + row + thread);
        work = shared.splits[thread].count != 1;
      }
      if (!__syncthreads_or(work)) {
        row += kMaxRows - 1;
        continue;
      }
      if (!waited) ptx::wait_for_previous_kernel();
      waited = true;
    }
    const RowSplits splits = shared.splits[in_shared];
    if (splits.count == 1) continue;
    const int width = slices_at_once(splits.count);
    const int end = min_of(last - row * kSlices, kSlices);
    int slice = (max_of(first - row * kSlices, 0) + width - 1) / width * width;
    for (; slice < end; slice += width) {
      merge_slices<Element>(p, first_row + row, splits, slice, turn == warp, shared);
      turn = (turn + 1) % kWarps;
    }
  }
  // A kernel behind this one may start when all of its CTAs have left: one of them stays until the results are there.
  if (blockIdx.x == 0 && !waited) ptx::wait_for_previous_kernel();
}

}  // namespace

Error reduce(const DecodeParams& params, const Device& device, bool dependent) {
  const int64_t rows = int64_t{params.tokens} * params.heads;
  int32_t multiprocessors = 0;
  Error error = device_attribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (!error.empty()) return error;
  // One wave of CTAs.
  const int64_t slices = rows * kSlices;
  const int64_t slices_a_cta = ceil_div(slices, int64_t{multiprocessors} * kCtas);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(ceil_div(slices, slices_a_cta)));
  shape.block = dim3(kThreads);
  shape.dependent = dependent;
  switch (params.out_dtype) {
    case DType::kBF16:
      return launch("the reduction of mla_decode", reduce_kernel<__nv_bfloat16>, shape, device, params,
                    static_cast<int32_t>(slices_a_cta));
    case DType::kF16:
      return launch("the reduction of mla_decode", reduce_kernel<__half>, shape, device, params,
                    static_cast<int32_t>(slices_a_cta));
    default: return std::string("jax_mla: mla_decode on CUDA cannot write ") + name_of(params.out_dtype);
  }
}

}  // namespace mla
