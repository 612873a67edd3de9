// The reduction of decode: for each (token, head) row, the partials of its tile merged in the order of their keys.
#include "kernels/decode/reduce.h"

#include <limits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/decode/plan_rule.h"

namespace mla {
namespace {

constexpr int kThreads = 128;  // a CTA of them fits beside one of the attention kernels
constexpr int kWarps = kThreads / 32;
constexpr int kColumns = 4;        // of a partial, a load: 16 bytes
constexpr int kLoads = 8;          // of a thread, on their way at once
constexpr int kSliceColumns = 32;  // the least that is merged as one
constexpr int kSlices = kLatent / kSliceColumns;
constexpr int kLookups = 64;  // slices that a CTA looks up at once
constexpr int kCtas = 6;      // a multiprocessor
constexpr int kMaxStreams = 16;
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

__device__ __forceinline__ RowSplits find_splits(const DecodeParams& p, int32_t row) {
  constexpr RowSplits kEmpty{0, 0, 0};
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  const int32_t token = divide(row, p.heads), head = row - token * p.heads;
  int32_t request, query;
  if (p.cu_q_lens == nullptr) {
    request = divide(token, p.max_q_len);
    query = token - request * p.max_q_len;
  } else {
    request = request_of(p.cu_q_lens, p.batch, token);
    if (request < 0 || token >= p.cu_q_lens[request + 1]) return kEmpty;
    // Not negative, and an overflow of garbage shows as a negative number.
    query = static_cast<int32_t>(static_cast<uint32_t>(token) - static_cast<uint32_t>(p.cu_q_lens[request]));
  }
  if (request >= p.batch || query < 0 || query >= p.max_q_len) return kEmpty;
  const int32_t request_row = query * p.heads + head;
  const int32_t row_tile = divide(request_row, p.plan.tile_rows);
  if (row_tile >= p.plan.row_tiles) return kEmpty;
  const TileSplits splits = p.plan.tile_splits[request * int64_t{p.plan.row_tiles} + row_tile];
  if (splits.count <= 0 || layer < 0 || layer >= p.layers) return kEmpty;
  if (splits.count == 1) return {0, 1, 0};
  const int32_t first = min_of(max_of(splits.first_partial, 0), p.plan.max_partials);  // a plan may hold anything
  const int32_t count = min_of(splits.count, p.plan.max_partials - first);
  return {first, count, request_row - row_tile * p.plan.tile_rows};
}

// What is merged as one, and by whom. It follows from the row's splits alone, and so do the bits of the result. Few
// splits are a warp's; of many each of the CTA's streams of lanes takes every so-manieth. The columns are as many as
// keep all of a thread's loads on their way at once.
struct Way {
  int streams;  // 1: a warp
  int slices;

  __device__ __forceinline__ explicit Way(int32_t splits) {
    streams = splits <= kLoads ? 1 : splits <= 4 * kLoads ? 4 : splits <= 8 * kLoads ? 8 : kMaxStreams;
    slices = splits <= 2 ? kSlices : streams == 1 ? 4 : kMaxStreams / streams;
  }
};

struct Unit {
  RowSplits splits;
  int32_t row;
  int32_t slice;
};

// What a thread has of its columns.
struct Sum {
  float highest = -INFINITY;  // lse
  float total = 0;            // of exp(lse - highest)
  float4 values = {};
};

__device__ __forceinline__ void scale(float4& v, float factor) {
  v = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
}

__device__ __forceinline__ void add_scaled(float4& sum, const float4& v, float weight) {
  sum.x += weight * v.x;
  sum.y += weight * v.y;
  sum.z += weight * v.z;
  sum.w += weight * v.w;
}

// A NaN shows: it is neither -inf nor 0.
__device__ __forceinline__ float weight_of(float lse, float highest) {
  return lse == -INFINITY ? 0.0f : ptx::exp2_approximate((lse - highest) * kLog2E);
}

// The splits first, first + step, .. below the count. Loads do not wait for the weights of what they load.
__device__ __forceinline__ Sum add_splits(const DecodeParams& p, const RowSplits& splits, int32_t first, int32_t step,
                                          int column) {
  const int64_t first_row = (int64_t{splits.first} + first) * p.plan.tile_rows + splits.local_row;
  const int32_t rows_a_step = step * p.plan.tile_rows;
  const float* lses = p.partial_lse + first_row;
  const float* outs = p.partial_out + first_row * kLatent + column;
  Sum sum;
#pragma unroll 1
  for (int32_t split = first; split < splits.count; split += kLoads * step) {
    float lse[kLoads];
    float4 values[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      lse[k] = -INFINITY;
      values[k] = float4{};
      if (split + k * step < splits.count) {
        lse[k] = __ldcg(lses + k * rows_a_step);
        values[k] = __ldcg(reinterpret_cast<const float4*>(outs + int64_t{k * rows_a_step} * kLatent));
      }
    }
    lses += kLoads * rows_a_step;
    outs += int64_t{kLoads * rows_a_step} * kLatent;
    float highest = sum.highest;
#pragma unroll
    for (int k = 0; k < kLoads; ++k) highest = fmaxf(highest, lse[k]);
    const float factor = weight_of(sum.highest, highest);
    sum.highest = highest;
    sum.total *= factor;
    scale(sum.values, factor);
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const float weight = weight_of(lse[k], highest);
      sum.total += weight;
      if (weight != 0) add_scaled(sum.values, values[k], weight);  // a piece without visible keys may hold anything
    }
  }
  return sum;
}

struct Shared {
  Unit units[kLookups];      // by one warp from the front, by all from the back
  int32_t by_warp, by_cta;   // how many
  float2 sums[kMaxStreams];  // highest and total
  float4 values[kThreads];
};

// One sum of the CTA's streams, in their order, by the first. `lanes`: threads of a stream.
__device__ __forceinline__ void add_streams(Shared& shared, int streams, int lanes, Sum& sum) {
  const int stream = threadIdx.x / lanes;
  __syncthreads();  // what was here has been read
  shared.values[threadIdx.x] = sum.values;
  if (threadIdx.x % lanes == 0) shared.sums[stream] = make_float2(sum.highest, sum.total);
  __syncthreads();
  if (stream != 0) return;
  sum = Sum{};
#pragma unroll 4
  for (int i = 0; i < streams; ++i) sum.highest = fmaxf(sum.highest, shared.sums[i].x);
#pragma unroll 4
  for (int i = 0; i < streams; ++i) {
    const float2 other = shared.sums[i];
    const float weight = other.y == 0 ? 0.0f : ptx::exp2_approximate((other.x - sum.highest) * kLog2E);
    sum.total += weight * other.y;
    add_scaled(sum.values, shared.values[i * lanes + threadIdx.x], weight);
  }
}

template <class Element>
__device__ __forceinline__ void store_row(const DecodeParams& p, int32_t row, int column, Sum& sum) {
  const bool empty = sum.total == 0;
  scale(sum.values, empty ? 0.0f : __fdividef(1.0f, sum.total));
  const uint2 packed{pack<Element>(sum.values.x, sum.values.y), pack<Element>(sum.values.z, sum.values.w)};
  *reinterpret_cast<uint2*>(static_cast<Element*>(p.out) + int64_t{row} * kLatent + column) = packed;
  if (column == 0) p.lse[row] = empty ? -INFINITY : sum.highest + logf(sum.total);
}

// A whole row of two splits, or of none, by a warp.
template <class Element>
__device__ __forceinline__ void merge_pair(const DecodeParams& p, int32_t row, const RowSplits& splits) {
  constexpr int kSplits = 2, kGroups = kLoads / kSplits, kGroupColumns = kLatent / kGroups;
  const int column = threadIdx.x % 32 * kColumns;
  const int64_t first_row = int64_t{splits.first} * p.plan.tile_rows + splits.local_row;
  float lse[kSplits];
  float4 values[kSplits][kGroups];
#pragma unroll
  for (int k = 0; k < kSplits; ++k) {
    const int64_t partial_row = first_row + k * p.plan.tile_rows;
    const auto* out = reinterpret_cast<const float4*>(p.partial_out + partial_row * kLatent + column);
    const bool exists = k < splits.count;
    lse[k] = exists ? __ldcg(p.partial_lse + partial_row) : -INFINITY;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) values[k][i] = exists ? __ldcg(out + i * kGroupColumns / kColumns) : float4{};
  }
  const float highest = fmaxf(lse[0], lse[1]);
  const float weights[kSplits] = {weight_of(lse[0], highest), weight_of(lse[1], highest)};
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    Sum sum{highest, weights[0] + weights[1]};
#pragma unroll
    for (int k = 0; k < kSplits; ++k) {
      if (weights[k] != 0) add_scaled(sum.values, values[k][i], weights[k]);
    }
    store_row<Element>(p, row, column + i * kGroupColumns, sum);
  }
}

// Of slices `first` + i * gridDim.x, so that the rows of a long request are spread over the device.
__device__ __forceinline__ void find_units(const DecodeParams& p, uint32_t first, uint32_t slices, Shared& shared) {
  if (threadIdx.x == 0) shared.by_warp = shared.by_cta = 0;
  __syncthreads();
  const uint32_t index = first + threadIdx.x * gridDim.x;
  if (threadIdx.x >= kLookups || index >= slices) return;
  Unit unit;
  unit.row = static_cast<int32_t>(index / kSlices);
  unit.slice = static_cast<int32_t>(index % kSlices);
  unit.splits = find_splits(p, unit.row);
  const Way way(unit.splits.count);
  if (unit.splits.count == 1 || unit.slice % way.slices != 0) return;
  if (way.streams == 1) {
    shared.units[atomicAdd(&shared.by_warp, 1)] = unit;
  } else {
    shared.units[kLookups - 1 - atomicAdd(&shared.by_cta, 1)] = unit;
  }
}

template <class Element>
__device__ __forceinline__ void merge_units(const DecodeParams& p, Shared& shared) {
  const int warp = threadIdx.x / 32;
  const int32_t by_warp = shared.by_warp, turns = (by_warp + kWarps - 1) / kWarps;
#pragma unroll 1
  for (int32_t turn = 0; turn < turns + shared.by_cta; ++turn) {
    const bool together = turn >= turns;
    const int32_t position = together ? kLookups - 1 - (turn - turns) : turn * kWarps + warp;
    if (!together && position >= by_warp) continue;
    const Unit unit = shared.units[position];
    if (unit.splits.count <= 2) {
      merge_pair<Element>(p, unit.row, unit.splits);
      continue;
    }
    const Way way(unit.splits.count);
    const int lanes = together ? kThreads / way.streams : 32;
    const int lane = threadIdx.x % lanes;
    const int column = unit.slice * kSliceColumns + lane * kColumns;
    const int stream = together ? threadIdx.x / lanes : 0;
    Sum sum = add_splits(p, unit.splits, stream, way.streams, column);
    if (together) add_streams(shared, way.streams, lanes, sum);
    if (stream == 0) store_row<Element>(p, unit.row, column, sum);
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads, kCtas)
    reduce_kernel(const __grid_constant__ DecodeParams p, uint32_t slices) {
  __shared__ Shared shared;
  bool waited = false;
#pragma unroll 1
  for (uint32_t first = blockIdx.x; first < slices; first += kLookups * gridDim.x) {
    // The plan was complete before the attention kernel started; its partials are what has to be waited for.
    __syncthreads();
    find_units(p, first, slices, shared);
    __syncthreads();
    if (shared.by_warp + shared.by_cta == 0) continue;
    if (!waited) ptx::wait_for_previous_kernel();
    waited = true;
    merge_units<Element>(p, shared);
  }
  // The kernel behind this one starts when all CTAs have left: one of them stays until the results are there.
  if (blockIdx.x == 0 && !waited) ptx::wait_for_previous_kernel();
}

}  // namespace

Error reduce(const DecodeParams& params, const Device& device, bool dependent) {
  const int64_t slices = int64_t{params.tokens} * params.heads * kSlices;
  if (slices > std::numeric_limits<int32_t>::max()) {
    return "jax_mla: the reduction of mla_decode counts with 32 bits, " + std::to_string(slices / kSlices) +
           " (token, head) rows are too many";
  }
  int32_t multiprocessors = 0;
  Error error = device_attribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (!error.empty()) return error;
  // One wave of CTAs; an odd number, so that each meets all the slices of a row.
  const auto wave = int64_t{multiprocessors} * kCtas - 1;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(slices < wave ? slices : wave));
  shape.block = dim3(kThreads);
  shape.dependent = dependent;
  const auto count = static_cast<uint32_t>(slices);
  switch (params.out_dtype) {
    case DType::kBF16:
      return launch("the reduction of mla_decode", reduce_kernel<__nv_bfloat16>, shape, device, params, count);
    case DType::kF16: return launch("the reduction of mla_decode", reduce_kernel<__half>, shape, device, params, count);
    default: return std::string("jax_mla: mla_decode on CUDA cannot write ") + name_of(params.out_dtype);
  }
}

}  // namespace mla
