// Sparse decode: each piece of work is the heads of one query token, or a tile of them, against one piece of its
// indices. What the indices name is written down first, so that the attention meets readable tokens alone.
#include <algorithm>
#include <atomic>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/scratch.h"
#include "kernels/decode/cpu/attention.h"
#include "kernels/decode/cpu/partials.h"
#include "kernels/entry.h"
#include "kernels/sparse/split.h"

namespace mla {
namespace {

using cpu::AttentionItem;
using cpu::AttentionKernel;

constexpr int64_t kGrainRows = 16;  // of the reduction

// The slots of one piece that are tokens, in order; returns how many.
int32_t choose_slots(const SparseDecodeParams& p, int64_t token, Piece piece, int32_t* slots) {
  const int32_t limit = p.topk_lens == nullptr ? p.topk : p.topk_lens[token];
  const int32_t* const indices = p.indices + token * p.topk;
  int32_t count = 0;
  for (int32_t i = piece.begin; i < std::min(piece.end, limit); ++i) {
    if (indices[i] >= 0 && indices[i] < p.slots) slots[count++] = indices[i];
  }
  return count;
}

// All but the slots and what differs from item to item.
AttentionItem common_item(const SparseDecodeParams& p, int32_t layer) {
  AttentionItem item{};
  const int64_t token_bytes = p.ds_mla ? kDsMlaBytes : kWidth * cpu::size_of(p.cache_dtype);
  item.q_latent_stride = p.q_latent_stride;
  item.q_rope_stride = p.q_rope_stride;
  item.cache = static_cast<const char*>(p.cache) + layer * p.slots * token_bytes;
  item.heads = p.heads;
  item.page_size = 1;
  const float q_scale = p.q_scale == nullptr ? 1.0f : *p.q_scale;
  const float k_scale = p.k_scale == nullptr ? 1.0f : p.k_scale[p.k_scales > 1 ? layer : 0];
  constexpr double kLog2E = 1.4426950408889634;
  item.score_scale = static_cast<float>(double{p.scale} * q_scale * k_scale * kLog2E);
  item.value_scale = k_scale;
  item.ds_mla = p.ds_mla;
  item.q_dtype = p.q_dtype;
  item.cache_dtype = p.cache_dtype;
  return item;
}

struct Work {
  int64_t token;
  int32_t tile, split;
};

// `item` with the rows of a tile; the results go to out and lse, or to the partials of the split.
void set_rows(const SparseDecodeParams& p, const Work& work, AttentionItem& item) {
  const int32_t first_head = work.tile * p.tile_rows;
  const int64_t row = work.token * p.heads + first_head;
  const int64_t q_size = cpu::size_of(p.q_dtype);
  item.q_latent = static_cast<const char*>(p.q_latent) + row * p.q_latent_stride * q_size;
  item.q_rope = static_cast<const char*>(p.q_rope) + row * p.q_rope_stride * q_size;
  item.rows = std::min(p.tile_rows, p.heads - first_head);
  if (p.splits == 1) {
    item.sink = p.sink == nullptr ? nullptr : p.sink + first_head;
    item.out = static_cast<char*>(p.out) + row * kLatent * cpu::size_of(p.out_dtype);
    item.lse = p.lse + row;
    item.out_dtype = p.out_dtype;
  } else {
    const int64_t partial = work.split * int64_t{p.tokens} * p.heads + row;
    item.out = p.partial_out + partial * kLatent;
    item.lse = p.partial_lse + partial;
    item.out_dtype = DType::kF32;
  }
}

// False when there is no memory.
bool attend(const SparseDecodeParams& p, const AttentionKernel& kernel, AttentionItem item, const Work& work) {
  static thread_local cpu::Scratch attention_scratch, slot_scratch;
  const Piece piece = piece_of(p.topk, p.splits, work.split);
  void* const memory = attention_scratch.get(kernel.scratch_bytes(p.tile_rows));
  auto* const slots = static_cast<int32_t*>(slot_scratch.get((piece.end - piece.begin + 1) * int64_t{sizeof(int32_t)}));
  if (memory == nullptr || slots == nullptr) return false;
  item.slots = slots;
  item.kv_end = choose_slots(p, work.token, piece, slots);
  item.first_limit = item.kv_end;
  set_rows(p, work, item);
  kernel.run(item, memory);
  return true;
}

cpu::OutputRow output_row(const SparseDecodeParams& p, int64_t row) {
  return {static_cast<char*>(p.out) + row * kLatent * cpu::size_of(p.out_dtype), p.lse + row, p.out_dtype};
}

void reduce(const SparseDecodeParams& p, const Device& device) {
  const int64_t rows = int64_t{p.tokens} * p.heads;
  cpu::parallel_ranges(device, rows, kGrainRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const cpu::Partials partials = {p.partial_out + row * kLatent, p.partial_lse + row, rows, p.splits};
      cpu::merge_partials(partials, p.sink == nullptr ? nullptr : p.sink + row % p.heads, output_row(p, row));
    }
  });
}

}  // namespace

Error sparse_decode(const SparseDecodeParams& p, const Device& device) {
  cpu::Isa isa = cpu::Isa::kPortable;
  if (Error error = cpu::choose(p.variant, isa); !error.empty()) return error;
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  if (layer < 0 || layer >= p.layers) {
    for (int64_t row = 0; row < int64_t{p.tokens} * p.heads; ++row) cpu::write_empty(output_row(p, row));
    return {};
  }
  const AttentionKernel& kernel = cpu::attention_kernel(isa, p.q_dtype, p.cache_dtype);
  const AttentionItem common = common_item(p, layer);
  const int32_t tiles = (p.heads + p.tile_rows - 1) / p.tile_rows;
  std::atomic<bool> has_memory = true;
  device.parallel_for(int64_t{p.tokens} * tiles * p.splits, [&](int64_t i) {
    const Work work = {i / p.splits / tiles, static_cast<int32_t>(i / p.splits % tiles),
                       static_cast<int32_t>(i % p.splits)};
    if (!attend(p, kernel, common, work)) has_memory = false;
  });
  if (!has_memory) return "no memory for tiles of " + std::to_string(p.tile_rows) + " rows";
  if (p.splits > 1) reduce(p, device);
  return {};
}

}  // namespace mla
