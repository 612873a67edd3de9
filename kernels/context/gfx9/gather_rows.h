// gather_context's kernel on AMD: rows of one chunk of cached context, from the pages where they lie into a
// workspace, dequantised.
//
// A block finds where its rows lie, a thread each, and then copies them by groups of eight columns, all of a thread's
// loads before its first store.
#pragma once

#include <type_traits>

#include "kernels/group.h"
#include "kernels/params.h"

namespace mla {

constexpr int kGatherThreads = 128;
constexpr int kGatherRows = 16;  // a block
constexpr int kLatentGroups = kLatent / kGroup;
constexpr int kGroups = kWidth / kGroup;
constexpr int kSteps = kGatherRows * kGroups / kGatherThreads;
static_assert(kGatherRows * kGroups % kGatherThreads == 0);

// A row in the cache: `Cached` elements that share the layer's scale.
template <class Cached>
struct Row {
  static constexpr int64_t kBytes = kWidth * sizeof(Cached);
  GroupBits<Cached> bits;

  __device__ __forceinline__ void load(const unsigned char* row, int group) {
    bits = load_group<Cached, /*kOnce=*/true>(row + group * kGroup * sizeof(Cached));
  }

  template <class Output>
  __device__ __forceinline__ GroupBits<Output> convert(int, float scale) const {
    return convert_group<Output, Cached>(bits, {scale});
  }
};

// fp8_ds_mla: 512 values in e4m3fn, a scale for each 128 of them, 64 rope values in bf16.
struct DsMla {};

template <>
struct Row<DsMla> {
  static constexpr int64_t kBytes = kDsMlaBytes;
  static constexpr int kRopeAt = kDsMlaBytes - kRope * 2;
  GroupBits<BF16> bits;  // or fp8 in the first half of them
  float own_scale;

  __device__ __forceinline__ void load(const unsigned char* row, int group) {
    if (group < kLatentGroups) {
      const auto latent = load_group<E4M3FN, /*kOnce=*/true>(row + group * kGroup);
      memcpy(&bits, &latent, sizeof(latent));
      own_scale = read_only(reinterpret_cast<const float*>(row + kLatent) + group / (kDsMlaGroup / kGroup));
    } else {
      bits = load_group<BF16, /*kOnce=*/true>(row + kRopeAt + (group - kLatentGroups) * kGroup * 2);
    }
  }

  template <class Output>
  __device__ __forceinline__ GroupBits<Output> convert(int group, float) const {
    if (group >= kLatentGroups) return convert_group<Output, BF16>(bits, {});
    GroupBits<E4M3FN> latent;
    memcpy(&latent, &bits, sizeof(latent));
    return convert_group<Output, E4M3FN>(latent, {own_scale});
  }
};

// Where the workspace's row w lies in the layer, or null. `request`: no later than the row's.
__device__ __forceinline__ const unsigned char* find_row(const GatherContextParams& p, const unsigned char* layer,
                                                         int64_t row_bytes, int64_t w, int32_t request) {
  while (request < p.batch && w >= p.cu_kv_lens[request + 1]) ++request;
  if (request >= p.batch || w < p.cu_kv_lens[request]) return nullptr;
  const int64_t token = p.starts[request] + (w - p.cu_kv_lens[request]);
  if (token < 0 || token / p.page_size >= p.max_pages) return nullptr;
  const int64_t page = p.page_table[int64_t{request} * p.max_pages + token / p.page_size];
  if (page < 0 || page >= p.pages) return nullptr;
  return layer + (page * p.page_size + token % p.page_size) * row_bytes;
}

template <class Cached, class Output>
__device__ __forceinline__ void gather_rows(const GatherContextParams& p) {
  __shared__ int32_t first_request;
  __shared__ const unsigned char* sources[kGatherRows];
  const int64_t first_row = int64_t{blockIdx.x} * kGatherRows;
  const int rows = p.rows - first_row < kGatherRows ? static_cast<int>(p.rows - first_row) : kGatherRows;
  const int thread = threadIdx.x;
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  const bool has_layer = layer >= 0 && layer < p.layers;
  if (thread == 0) first_request = p.batch;
  __syncthreads();
  for (int32_t request = thread; request < p.batch; request += kGatherThreads) {
    if (p.cu_kv_lens[request + 1] <= first_row) continue;
    atomicMin(&first_request, request);
    break;
  }
  __syncthreads();
  if (thread < kGatherRows) {
    const auto* start = static_cast<const unsigned char*>(p.cache) +
                        (has_layer ? layer * p.pages * p.page_size * Row<Cached>::kBytes : 0);
    sources[thread] = has_layer && thread < rows
                          ? find_row(p, start, Row<Cached>::kBytes, first_row + thread, first_request)
                          : nullptr;
  }
  const float scale = !has_layer || p.k_scale == nullptr ? 1.0f : p.k_scale[p.k_scales > 1 ? layer : 0];
  __syncthreads();

  Row<Cached> read[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int i = step * kGatherThreads + thread;
    const unsigned char* source = sources[i / kGroups];
    if (source != nullptr) read[step].load(source, i % kGroups);
  }
  Output* latent = static_cast<Output*>(p.latent) + first_row * kLatent;
  Output* rope = static_cast<Output*>(p.rope) + first_row * kRope;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int i = step * kGatherThreads + thread, row = i / kGroups, group = i % kGroups;
    if (row >= rows) break;
    GroupBits<Output> converted{};
    if (sources[row] != nullptr) converted = read[step].template convert<Output>(group, scale);
    store_group<Output>(group < kLatentGroups ? latent + row * kLatent + group * kGroup
                                              : rope + row * kRope + (group - kLatentGroups) * kGroup,
                        converted);
  }
}

}  // namespace mla
