// What prefill hands to the attention kernels: queries of one head and the keys that they see, clamped to the shapes.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace mla::cpu {

// Queries are worked on in tiles. Where tiles begin is part of the result's bits: at multiples of this from a request's
// first query. How many of them share an item is not.
constexpr int32_t kPrefillTileRows = 96;
constexpr int32_t kPrefillItemTiles = 6;  // at most, in one item

struct PrefillItem {
  const void* q;     // row r starts r * q_stride elements on
  const void* nope;  // of key j starts j * nope_stride elements on
  const void* rope;  // likewise with rope_stride
  const void* v;     // likewise with v_stride
  int64_t q_stride;
  int64_t nope_stride;
  int64_t rope_stride;
  int64_t v_stride;
  const uint32_t* key_mask;  // null, or key j is bit first_key + j of it
  int64_t first_key;
  void* out;   // row r starts r * out_stride elements on, in out_dtype
  float* lse;  // row r is lse_stride elements on
  int64_t out_stride;
  int64_t lse_stride;
  int64_t first_limit;  // row r sees the keys below first_limit, or below first_limit + r where `causal`
  int64_t keys;         // and below this
  int32_t rows;         // to kPrefillItemTiles * kPrefillTileRows
  float score_scale;    // scores become exponents of 2
  bool causal;
  bool merge;
  DType out_dtype;
};

// One instruction set's attention for one dtype.
struct PrefillKernel {
  int64_t (*scratch_bytes)();
  void (*run)(const PrefillItem& item, void* scratch);  // scratch is aligned to 64 bytes
};

// fp32 arithmetic, for one of the dtypes.
struct PrefillKernels {
  PrefillKernel f32, f16, bf16;
};

extern const PrefillKernels kPortablePrefill;
#if defined(__x86_64__)
extern const PrefillKernels kAvx2Prefill;
extern const PrefillKernels kAvx512Prefill;
// bf16 products summed in fp32.
extern const PrefillKernel kAvx512Bf16Prefill;
extern const PrefillKernel kAmxPrefill;
#endif

}  // namespace mla::cpu
