// Runs a plan's work items on the best attention kernel of the machine, part by part, then reduces.
#include <atomic>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/scratch.h"
#include "kernels/decode/cpu/attention.h"
#include "kernels/decode/cpu/reduce.h"
#include "kernels/decode/cpu/requests.h"
#include "kernels/entry.h"

namespace mla {
namespace {

using cpu::AttentionItem;
using cpu::AttentionKernel;
using cpu::Isa;

// Clamps a work item to the shapes; false where nothing is left of it.
bool clamp_item(const DecodeParams& p, const WorkItem& work, AttentionItem& item) {
  const DecodePlan& plan = p.plan;
  const int32_t b = work.request;
  if (b < 0 || b >= p.batch || work.row_tile < 0 || work.row_tile >= plan.row_tiles) return false;
  if (work.partial < -1 || work.partial >= plan.max_partials) return false;

  const cpu::Request request = cpu::request_of(p, b);
  const int64_t first_row = int64_t{work.row_tile} * plan.tile_rows;
  const int64_t rows = std::min<int64_t>(plan.tile_rows, request.queries * p.heads - first_row);
  if (rows <= 0) return false;

  const int64_t kv_len = std::max(p.kv_lens[b], 0);
  const int64_t readable = std::min({kv_len, int64_t{p.max_pages} * p.page_size, int64_t{work.kv_end}});
  const int32_t layer = cpu::layer_of(p);
  const int64_t row = request.first_token * p.heads + first_row;
  const int64_t q_size = cpu::size_of(p.q_dtype);
  const int64_t token_bytes = p.ds_mla ? kDsMlaBytes : kWidth * cpu::size_of(p.cache_dtype);

  item.q_latent = static_cast<const char*>(p.q_latent) + row * p.q_latent_stride * q_size;
  item.q_rope = static_cast<const char*>(p.q_rope) + row * p.q_rope_stride * q_size;
  item.q_latent_stride = p.q_latent_stride;
  item.q_rope_stride = p.q_rope_stride;
  item.cache = static_cast<const char*>(p.cache) + layer * p.pages * p.page_size * token_bytes;
  item.slots = nullptr;
  item.page_table = p.page_table + int64_t{b} * p.max_pages;
  item.sink = nullptr;
  item.pages = p.pages;
  item.first_limit = p.causal ? kv_len - request.declared + 1 : kv_len;
  item.kv_begin = std::max(work.kv_begin, 0);
  item.kv_end = static_cast<int32_t>(std::max<int64_t>(readable, 0));
  item.first_row = static_cast<int32_t>(first_row);
  item.rows = static_cast<int32_t>(rows);
  item.heads = p.heads;
  item.page_size = p.page_size;
  item.ds_mla = p.ds_mla;
  item.q_dtype = p.q_dtype;
  item.cache_dtype = p.cache_dtype;
  const float q_scale = p.q_scale == nullptr ? 1.0f : *p.q_scale;
  const float k_scale = p.k_scale == nullptr ? 1.0f : p.k_scale[p.k_scales > 1 ? layer : 0];
  constexpr double kLog2E = 1.4426950408889634;
  item.score_scale = static_cast<float>(double{p.scale} * q_scale * k_scale * kLog2E);
  item.value_scale = k_scale;
  if (work.partial < 0) {
    item.out = static_cast<char*>(p.out) + row * kLatent * cpu::size_of(p.out_dtype);
    item.lse = p.lse + row;
    item.out_dtype = p.out_dtype;
  } else {
    const int64_t slot = int64_t{work.partial} * plan.tile_rows;
    item.out = p.partial_out + slot * kLatent;
    item.lse = p.partial_lse + slot;
    item.out_dtype = DType::kF32;
  }
  return true;
}

// The attention over the items of one part; false when there is no memory.
bool run_part(const DecodeParams& p, const AttentionKernel& kernel, int64_t part) {
  static thread_local cpu::Scratch scratch;
  void* const memory = scratch.get(kernel.scratch_bytes(p.plan.tile_rows));
  if (memory == nullptr) return false;
  const int32_t begin = std::max(p.plan.part_offsets[part], 0);
  const int32_t end = std::min(p.plan.part_offsets[part + 1], p.plan.max_items);
  for (int32_t i = begin; i < end; ++i) {
    AttentionItem item;
    if (clamp_item(p, p.plan.items[i], item)) kernel.run(item, memory);
  }
  return true;
}

}  // namespace

Error decode(const DecodeParams& p, const Device& device) {
  Isa isa = Isa::kPortable;
  if (Error error = cpu::choose(p.variant, isa); !error.empty()) return error;
  if (cpu::layer_of(p) >= 0) {
    const AttentionKernel& kernel = cpu::attention_kernel(isa, p.q_dtype, p.cache_dtype);
    std::atomic<bool> has_memory = true;
    device.parallel_for(p.plan.parts, [&](int64_t part) {
      if (!run_part(p, kernel, part)) has_memory = false;
    });
    if (!has_memory) return "no memory for tiles of " + std::to_string(p.plan.tile_rows) + " rows";
  }
  cpu::reduce(p, device);
  return {};
}

}  // namespace mla
