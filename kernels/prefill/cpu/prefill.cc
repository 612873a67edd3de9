// Cuts a ragged batch into items of one head and a few tiles of queries, and runs them on the machine's best kernel.
//
// Items write rows of their own, and a row's arithmetic depends on its place in its request alone: the same bits for
// any number of threads and in any batch.
#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/scratch.h"
#include "kernels/entry.h"
#include "kernels/prefill/cpu/attention.h"
#include "kernels/prefill/parts.h"

namespace mla {
namespace {

using cpu::Isa;
using cpu::kPrefillItemTiles;
using cpu::kPrefillTileRows;
using cpu::PrefillItem;
using cpu::PrefillKernel;

// Enough items for each thread that the last ones end at about the same time.
constexpr int64_t kItemsPerThread = 8;

// Consecutive queries and the keys that they may see, clamped into the arrays.
struct Request {
  int64_t first_token, tokens;
  int64_t first_key, keys;
  int64_t first_limit;  // of the keys, for the first query
};

struct Item {
  int32_t request;
  int32_t head;
  int64_t first_tile, tiles;
  int64_t cost;  // (tile, key) pairs
};

// The batch's requests in order, and as requests without keys the queries that none of them owns. Whatever cu_q_lens
// holds, no query is in two of them.
std::vector<Request> requests_of(const PrefillParams& p) {
  std::vector<Request> requests;
  int64_t covered = 0;
  const auto cover = [&](int64_t until) {
    if (until > covered) requests.push_back({covered, until - covered, 0, 0, 0});
  };
  for (int32_t b = 0; b < p.batch; ++b) {
    const int64_t declared_first = p.cu_q_lens[b], declared_end = p.cu_q_lens[b + 1];
    const int64_t first = std::max(declared_first, covered), end = std::min<int64_t>(declared_end, p.tokens);
    if (first >= end) continue;
    const int64_t first_key = std::clamp<int64_t>(p.cu_kv_lens[b], 0, p.stored);
    const int64_t end_key = std::clamp<int64_t>(p.cu_kv_lens[b + 1], first_key, p.stored);
    // The request's last query sees its last key.
    const int64_t limit = p.cu_kv_lens[b + 1] - (declared_end - first) + 1;
    cover(first);
    requests.push_back(
        {first, end - first, first_key, end_key - first_key, p.causal ? limit - first_key : end_key - first_key});
    covered = end;
  }
  cover(p.tokens);
  return requests;
}

int64_t tiles_of(const Request& request) { return (request.tokens + kPrefillTileRows - 1) / kPrefillTileRows; }

int64_t cost_of(const PrefillParams& p, const Request& request, int64_t first_tile, int64_t tiles) {
  int64_t cost = 0;
  for (int64_t tile = first_tile; tile < first_tile + tiles; ++tile) {
    const int64_t last = std::min((tile + 1) * kPrefillTileRows, request.tokens) - 1;
    cost += std::clamp<int64_t>(request.first_limit + (p.causal ? last : 0), 0, request.keys);
  }
  return cost;
}

// Longest first, so that what is left at the end is short.
std::vector<Item> cut(const PrefillParams& p, const std::vector<Request>& requests, int32_t threads) {
  int64_t all_tiles = 0;
  for (const Request& request : requests) all_tiles += tiles_of(request) * p.heads;
  const int64_t wanted = kItemsPerThread * std::max(threads, 1);
  const int64_t most_tiles = std::clamp<int64_t>(all_tiles / wanted, 1, kPrefillItemTiles);
  std::vector<Item> items;
  for (size_t r = 0; r < requests.size(); ++r) {
    const int64_t tiles = tiles_of(requests[r]);
    const int64_t pieces = (tiles + most_tiles - 1) / most_tiles;
    for (int64_t i = 0; i < pieces; ++i) {
      const int64_t first = tiles * i / pieces, count = tiles * (i + 1) / pieces - first;
      const int64_t cost = cost_of(p, requests[r], first, count);
      if (cost == 0 && p.merge) continue;  // rows without keys stay as they are
      for (int32_t head = 0; head < p.heads; ++head)
        items.push_back({static_cast<int32_t>(r), head, first, count, cost});
    }
  }
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
  return items;
}

PrefillItem item_of(const PrefillParams& p, const Request& request, const Item& work) {
  const int64_t size = cpu::size_of(p.dtype);
  const int64_t first_row = work.first_tile * kPrefillTileRows;
  const int64_t row = (request.first_token + first_row) * p.heads + work.head;
  const auto first_key = [&](const ArrayPart& part) {
    const int64_t start = part.offset + request.first_key * part.token_stride + work.head * part.head_stride;
    return static_cast<const char*>(part.data) + start * size;
  };
  const ArrayPart nope = nope_part(p), rope = rope_part(p), value = value_part(p);
  PrefillItem item{};
  item.q = static_cast<const char*>(p.q) + row * kHeadDim * size;
  item.nope = first_key(nope);
  item.rope = first_key(rope);
  item.v = first_key(value);
  item.q_stride = int64_t{p.heads} * kHeadDim;
  item.nope_stride = nope.token_stride;
  item.rope_stride = rope.token_stride;
  item.v_stride = value.token_stride;
  item.key_mask = p.key_mask;
  item.first_key = request.first_key;
  item.out = static_cast<char*>(p.out) + row * kNope * cpu::size_of(p.out_dtype);
  item.lse = p.lse + row;
  item.out_stride = int64_t{p.heads} * kNope;
  item.lse_stride = p.heads;
  item.first_limit = request.first_limit + (p.causal ? first_row : 0);
  item.keys = request.keys;
  item.rows = static_cast<int32_t>(std::min(request.tokens - first_row, work.tiles * kPrefillTileRows));
  constexpr double kLog2E = 1.4426950408889634;
  item.score_scale = static_cast<float>(p.scale * kLog2E);
  item.causal = p.causal;
  item.merge = p.merge;
  item.out_dtype = p.out_dtype;
  return item;
}

// Null for dtypes without a kernel. fp16 and fp32 keep more than bf16 holds: the sets whose bf16 kernels come first run
// those in fp32.
const PrefillKernel* kernel_of(Isa isa, DType type) {
  const cpu::PrefillKernels* kernels = &cpu::kPortablePrefill;
#if defined(__x86_64__)
  if (isa == Isa::kAmx && type == DType::kBF16) return &cpu::kAmxPrefill;
  if (isa == Isa::kAvx512Bf16 && type == DType::kBF16) return &cpu::kAvx512Bf16Prefill;
  if (isa == Isa::kAmx || isa == Isa::kAvx512Bf16 || isa == Isa::kAvx512) kernels = &cpu::kAvx512Prefill;
  if (isa == Isa::kAvx2) kernels = &cpu::kAvx2Prefill;
#else
  (void)isa;
#endif
  switch (type) {
    case DType::kF32: return &kernels->f32;
    case DType::kF16: return &kernels->f16;
    case DType::kBF16: return &kernels->bf16;
    default: return nullptr;
  }
}

}  // namespace

Error prefill(const PrefillParams& p, const Device& device) {
  Isa isa = Isa::kPortable;
  if (Error error = cpu::choose(p.variant, isa); !error.empty()) return error;
  const PrefillKernel* const kernel = kernel_of(isa, p.dtype);
  if (kernel == nullptr) return "prefill has no CPU kernel for dtypes of 8 bits";
  const std::vector<Request> requests = requests_of(p);
  const std::vector<Item> items = cut(p, requests, device.threads);
  std::atomic<bool> has_memory = true;
  device.parallel_for(static_cast<int64_t>(items.size()), [&](int64_t i) {
    static thread_local cpu::Scratch scratch;
    void* const memory = scratch.get(kernel->scratch_bytes());
    if (memory == nullptr) {
      has_memory = false;
      return;
    }
    kernel->run(item_of(p, requests[items[i].request], items[i]), memory);
  });
  if (!has_memory) return "no memory for " + std::to_string(kernel->scratch_bytes()) + " bytes of scratch";
  return {};
}

}  // namespace mla
