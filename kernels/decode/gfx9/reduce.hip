// The reduction of decode on AMD: for each (token, head) row, the partials of its tile merged in the order of their
// keys.
//
// A row's work is cut into slices of its columns. Blocks look up 64 slices at a time, a lane each, and then merge those
// that need it: few splits by a wave for 256 columns, many by the whole block for 64 columns, whose 16 streams of lanes
// take every 16th split. Who merges what follows from the row's splits alone, and so do the bits of the result.
#include "kernels/decode/plan_rule.h"
#include "kernels/rocm/device.h"

namespace mla {
namespace {

constexpr int kThreads = 256;
constexpr int kWaves = kThreads / kWave;
constexpr int kColumns = 4;        // of a partial, a load: 16 bytes
constexpr int kLoads = 8;          // of a thread, on their way at once
constexpr int kSliceColumns = 64;  // a block's with many splits
constexpr int kSlices = kLatent / kSliceColumns;
constexpr int kLanes = kSliceColumns / kColumns;  // of a stream
constexpr int kStreams = kThreads / kLanes;
constexpr int kWaveSlices = kWave * kColumns / kSliceColumns;
constexpr float kLog2E = 1.4426950408889634f;

// Where a row's result is: partials [first, first + count), `local_row` of each. count 0: an empty row, 1: written.
struct RowSplits {
  int32_t first;
  int32_t count;
  int32_t local_row;

  __device__ __forceinline__ bool by_wave() const { return count <= kLoads; }
};

// The last request that starts at or before `token`, or -1.
__device__ __forceinline__ int32_t request_of(const DecodeParams& p, int32_t token) {
  int32_t below = -1, above = p.batch;
  while (above - below > 1) {
    const int32_t middle = below + (above - below) / 2;
    if (p.cu_q_lens[middle] <= token) {
      below = middle;
    } else {
      above = middle;
    }
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
    request = request_of(p, token);
    if (request < 0 || token >= p.cu_q_lens[request + 1]) return kEmpty;
    // Not negative, and an overflow of garbage shows as a negative number.
    query = static_cast<int32_t>(static_cast<uint32_t>(token) - static_cast<uint32_t>(p.cu_q_lens[request]));
  }
  if (request >= p.batch || query < 0 || query >= p.max_q_len) return kEmpty;
  const int32_t request_row = query * p.heads + head, row_tile = divide(request_row, p.plan.tile_rows);
  if (row_tile >= p.plan.row_tiles || layer < 0 || layer >= p.layers) return kEmpty;
  const TileSplits splits = p.plan.tile_splits[int64_t{request} * p.plan.row_tiles + row_tile];
  if (splits.count <= 0) return kEmpty;
  if (splits.count == 1) return {0, 1, 0};
  const int32_t first = min_of(max_of(splits.first_partial, 0), p.plan.max_partials);  // a plan may hold anything
  return {first, min_of(splits.count, p.plan.max_partials - first), request_row - row_tile * p.plan.tile_rows};
}

// What a thread has of its columns.
struct PartialSum {
  float highest = -INFINITY;  // lse
  float total = 0;            // of exp(lse - highest)
  F32x4 values = {0, 0, 0, 0};
};

// A NaN shows: it is neither -inf nor 0.
__device__ __forceinline__ float weight_of(float lse, float highest) {
  return lse == -INFINITY ? 0.0f : exp2_approximate((lse - highest) * kLog2E);
}

// Of `sum` and `other`; what has no weight may hold anything.
__device__ __forceinline__ void add(PartialSum& sum, float highest, float total, F32x4 values) {
  const float top = fmaxf(sum.highest, highest);
  const float own = weight_of(sum.highest, top), weight = weight_of(highest, top);
  sum.highest = top;
  sum.total = own * sum.total + weight * total;
  sum.values *= own;
  if (weight != 0) sum.values += weight * values;
}

// The splits first, first + step, .. below the count. Loads do not wait for the weights of what they load.
__device__ __forceinline__ PartialSum add_splits(const DecodeParams& p, const RowSplits& splits, int32_t first,
                                                 int32_t step, int column) {
  PartialSum sum;
#pragma unroll 1
  for (int32_t split = first; split < splits.count; split += kLoads * step) {
    float lse[kLoads];
    F32x4 values[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      lse[k] = -INFINITY;
      values[k] = F32x4{0, 0, 0, 0};
      if (split + k * step >= splits.count) continue;
      const int64_t row = int64_t{splits.first + split + k * step} * p.plan.tile_rows + splits.local_row;
      lse[k] = p.partial_lse[row];
      values[k] = *reinterpret_cast<const F32x4*>(p.partial_out + row * kLatent + column);
    }
    float highest = sum.highest;
#pragma unroll
    for (int k = 0; k < kLoads; ++k) highest = fmaxf(highest, lse[k]);
    const float own = weight_of(sum.highest, highest);
    sum.highest = highest;
    sum.total *= own;
    sum.values *= own;
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const float weight = weight_of(lse[k], highest);
      sum.total += weight;
      if (weight != 0) sum.values += weight * values[k];  // a piece without visible keys may hold anything
    }
  }
  return sum;
}

template <class Element>
__device__ __forceinline__ void store_columns(const DecodeParams& p, int32_t row, int column, PartialSum sum) {
  const bool empty = sum.total == 0;
  sum.values *= empty ? 0.0f : reciprocal_approximate(sum.total);
  Vector<Element, kColumns> packed;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) packed.at[c] = from_float<Element>(sum.values[c]);
  *reinterpret_cast<Vector<Element, kColumns>*>(static_cast<Element*>(p.out) + int64_t{row} * kLatent + column) =
      packed;
  if (column == 0) p.lse[row] = empty ? -INFINITY : sum.highest + logf(sum.total);
}

struct Streams {
  float highest[kWaves][kLanes];
  float total[kWaves][kLanes];
  F32x4 values[kWaves][kLanes];
};

// One slice by the block: its streams are added within each wave, and then the waves in their order.
template <class Element>
__device__ __forceinline__ void merge_by_block(const DecodeParams& p, Streams& shared, int32_t row,
                                               const RowSplits& splits, int32_t slice) {
  const int lane = lane_id() % kLanes, wave = wave_id(), column = slice * kSliceColumns + lane * kColumns;
  PartialSum sum = add_splits(p, splits, threadIdx.x / kLanes, kStreams, column);
#pragma unroll
  for (int distance = kLanes; distance < kWave; distance *= 2) {
    F32x4 values;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) values[c] = shuffle_xor(static_cast<float>(sum.values[c]), distance);
    add(sum, shuffle_xor(sum.highest, distance), shuffle_xor(sum.total, distance), values);
  }
  __syncthreads();  // what was here has been read
  if (lane_id() < kLanes) {
    shared.highest[wave][lane] = sum.highest;
    shared.total[wave][lane] = sum.total;
    shared.values[wave][lane] = sum.values;
  }
  __syncthreads();
  if (threadIdx.x >= kLanes) return;
  for (int other = 1; other < kWaves; ++other) {
    add(sum, shared.highest[other][lane], shared.total[other][lane], shared.values[other][lane]);
  }
  store_columns<Element>(p, row, column, sum);
}

// Slices blockIdx.x, blockIdx.x + gridDim.x, .., so that the rows of a long request are spread over the device.
template <class Element>
__device__ __forceinline__ void reduce_rows(const DecodeParams& p, uint32_t slices) {
  __shared__ Streams shared;
  const uint32_t blocks = gridDim.x;
#pragma unroll 1
  for (uint32_t first = blockIdx.x; first < slices; first += kWave * blocks) {
    const uint32_t index = first + lane_id() * blocks;  // every wave looks all of them up
    const bool exists = index < slices;
    const auto row = static_cast<int32_t>(index / kSlices), slice = static_cast<int32_t>(index % kSlices);
    const RowSplits splits = exists ? find_splits(p, row) : RowSplits{0, 1, 0};
    const bool wanted = exists && splits.count != 1 && (!splits.by_wave() || slice % kWaveSlices == 0);
    int turn = 0;
#pragma unroll 1
    for (LaneMask left = ballot(wanted); left != 0; left &= left - 1) {
      const int from = first_lane(left);
      const RowSplits one{uniform(shuffle(splits.first, from)), uniform(shuffle(splits.count, from)),
                          uniform(shuffle(splits.local_row, from))};
      const int32_t its_row = uniform(shuffle(row, from)), its_slice = uniform(shuffle(slice, from));
      if (!one.by_wave()) {
        merge_by_block<Element>(p, shared, its_row, one, its_slice);
      } else if (turn++ % kWaves == wave_id()) {
        const int column = its_slice * kSliceColumns + lane_id() * kColumns;
        store_columns<Element>(p, its_row, column, add_splits(p, one, 0, 1, column));
      }
    }
  }
}

}  // namespace

MLA_KERNEL __launch_bounds__(kThreads) mla_reduce_bf16(DecodeParams p, uint32_t slices) {
  reduce_rows<BF16>(p, slices);
}
MLA_KERNEL __launch_bounds__(kThreads) mla_reduce_f16(DecodeParams p, uint32_t slices) { reduce_rows<F16>(p, slices); }

}  // namespace mla
