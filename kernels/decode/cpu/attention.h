// What decode and sparse decode hand to the attention kernels: one work item whose every number was clamped to the
// shapes.
#pragma once

#include <cstdint>

#include "kernels/cpu/isa.h"
#include "kernels/params.h"

namespace mla::cpu {

struct AttentionItem {
  const void* q_latent;  // first row of the tile
  const void* q_rope;
  int64_t q_latent_stride;  // elements from row to row
  int64_t q_rope_stride;
  const void* cache;          // [pages, P, D], the layer's; where ds_mla [pages, P, 656] bytes
  const int32_t* slots;       // [kv_end]: where the tokens lie, all of them in the cache; null: page_table says it
  const int32_t* page_table;  // [max_pages], the request's
  const float* sink;          // [rows]: natural-log logits that join the denominators and not lse; null: none
  void* out;                  // [rows, L] in out_dtype
  float* lse;                 // [rows]
  int64_t pages;
  int64_t first_limit;  // row r of the tile sees tokens below first_limit + (first_row + r) / heads ...
  int32_t kv_begin;     // ... in [kv_begin, kv_end), which page_table covers
  int32_t kv_end;
  int32_t first_row;  // of the tile, among the request's q_len * heads rows
  int32_t rows;       // of the tile
  int32_t heads;
  int32_t page_size;
  float score_scale;  // scores become exponents of 2
  float value_scale;  // of the output
  bool ds_mla;        // 512 e4m3fn values, 4 fp32 scales, one for each 128, 64 bf16 rope values; cache_dtype kE4M3FN
  DType q_dtype;
  DType cache_dtype;
  DType out_dtype;
};

// One instruction set's attention.
struct AttentionKernel {
  int64_t (*scratch_bytes)(int32_t rows);
  void (*run)(const AttentionItem& item, void* scratch);  // scratch is aligned to 64 bytes
};

// fp32 arithmetic, for every dtype.
extern const AttentionKernel kPortableAttention;
#if defined(__x86_64__)
extern const AttentionKernel kAvx2Attention;
extern const AttentionKernel kAvx512Attention;
// bf16 products summed in fp32, for bf16 and fp8 queries and caches.
extern const AttentionKernel kAvx512Bf16Attention;
extern const AttentionKernel kAmxAttention;
#endif

// What an instruction set runs for these dtypes.
const AttentionKernel& attention_kernel(Isa isa, DType q, DType cache);

}  // namespace mla::cpu
