// The contract between the FFI handlers and the kernels: one plain struct an operation, its shapes behind each field.
//
// Letters: B sequences, T query tokens, H query heads (padded where the wrapper pads), L = 512 latent width,
// R = 64 rope width, D = L + R, P page size, V = batch * row_tiles virtual rows of work.
// A pointer is a device pointer on a GPU. Shapes are trusted (the handler checked them); *values* in device arrays
// (page ids, lengths, slots, the layer, a plan) are not: no value may cause an access outside these shapes.
#pragma once

#include <cstdint>

namespace mla {

constexpr int kLatent = 512;             // L
constexpr int kRope = 64;                // R
constexpr int kWidth = kLatent + kRope;  // D
constexpr int kNope = 128;               // nope part of an up-projected key, and the width of a value
constexpr int kHeadDim = kNope + kRope;  // up-projected query and key width
constexpr int kDsMlaGroup = 128;         // latent values that share a scale in an fp8_ds_mla cache
constexpr int kDsMlaBytes = kLatent + kLatent / kDsMlaGroup * 4 + kRope * 2;  // 656 a token: values, scales, bf16 rope

// Values as the fp8 prefill kernel reads them: tiles of 16 tokens, counted from the array's first, in each of which a
// head's columns lie one after the other, with their tokens in this order: 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15.
// That is where a lane of the tensor cores has the weights of its row, so that they need not move. Behind the last
// token are zeros.
constexpr int kValueTile = 16;

// Tokens in one block of the work split: the plan cuts a sequence at multiples of it.
constexpr int kBlockTokens = 64;

enum class DType : int32_t {
  kF32 = 0,
  kBF16 = 1,
  kF16 = 2,
  kE4M3FN = 3,    // OCP e4m3: max 448, NaN 0x7F / 0xFF
  kE4M3FNUZ = 4,  // gfx942's e4m3: max 240, NaN 0x80
};

// One piece of decode work: keys [kv_begin, kv_end) of a request against one tile of its (query, head) rows.
struct WorkItem {
  int32_t request;   // b
  int32_t row_tile;  // rows [row_tile * tile_rows, ...) of the request's q_len * H rows, query-major
  int32_t kv_begin;  // tokens, a multiple of kBlockTokens
  int32_t kv_end;    // tokens, exclusive
  int32_t partial;   // slot in the partials; -1: the tile is not split, write out and lse directly
  int32_t reserved[3];
};
static_assert(sizeof(WorkItem) == 32, "read as eight int32 by Python and by the planner's tests");

// How a row tile of a request was split; indexed by request * row_tiles + row_tile.
struct TileSplits {
  int32_t first_partial;  // slots [first_partial, first_partial + count) in order of tokens; -1 when count < 2
  int32_t count;          // 0: no keys, the reduction writes an empty row; 1: written directly
};

// The work split, made by plan_decode, read by decode.
struct DecodePlan {
  WorkItem* items;          // [max_items], sorted by part
  int32_t* part_offsets;    // [parts + 1]: part p runs items [part_offsets[p], part_offsets[p + 1])
  TileSplits* tile_splits;  // [B * row_tiles]
  int32_t parts;
  int32_t max_items;
  int32_t max_partials;
  int32_t row_tiles;  // tiles of a request with max_q_len queries: ceil(max_q_len * H / tile_rows)
  int32_t tile_rows;  // (query, head) rows a tile
};

struct PlanDecodeParams {
  const int32_t* kv_lens;    // [B]
  const int32_t* cu_q_lens;  // [B + 1], or null: every request has max_q_len queries
  DecodePlan plan;           // written: all max_items items (unused ones zero), all offsets, all splits
  int32_t batch;
  int32_t heads;
  int32_t max_q_len;
  int32_t overhead_blocks;  // fixed cost of a tile, in blocks
  int32_t min_part_blocks;  // a part is not made smaller than this cost, ...
  int32_t few_pieces;       // ... but of one block where all tiles together have no more blocks than this
  int32_t slack;            // a part may have this much more than its share where that saves cuts, in 1/64 of the share
  bool batch_invariant;     // a tile's splits depend on its own length alone
};

struct DecodeParams {
  const void* q_latent;       // [T, H, L] in q_dtype; row (t, h) starts q_latent_stride elements after row (t, h - 1)
  const void* q_rope;         // [T, H, R] in q_dtype, likewise with q_rope_stride
  int64_t q_latent_stride;    // D when q came as one array, else L
  int64_t q_rope_stride;      // D or R
  const void* cache;          // [layers, pages, P, D] in cache_dtype; where ds_mla [layers, pages, P, 656] bytes
  const int32_t* layer;       // [], or null when layers == 1; outside [0, layers): every row is empty
  const int32_t* page_table;  // [B, max_pages]; an id outside [0, pages) masks its tokens
  const int32_t* kv_lens;     // [B]; below 0 counts as 0, tokens at or past max_pages * P are masked
  const int32_t* cu_q_lens;   // [B + 1], or null: request b owns queries [b * max_q_len, (b + 1) * max_q_len)
  const float* q_scale;       // [], or null: 1
  const float* k_scale;       // [k_scales], or null: 1
  DecodePlan plan;
  void* out;           // [T, H, L] in out_dtype
  float* lse;          // [T, H], natural log; an empty row has out 0 and lse -inf
  float* partial_out;  // [max_partials, tile_rows, L], scratch
  float* partial_lse;  // [max_partials, tile_rows], scratch, natural log
  int64_t pages;
  int32_t layers;
  int32_t page_size;
  int32_t max_pages;
  int32_t batch;
  int32_t tokens;  // T
  int32_t heads;   // H
  int32_t max_q_len;
  int32_t k_scales;  // 1 or layers
  int32_t variant;   // 0: the best this machine runs; n: the n-th name of variants() in capability.h
  float scale;       // of the scores, before softmax (multiplied with q_scale and k_scale)
  bool causal;       // query i of n sees keys j <= kv_len - n + i
  bool ds_mla;       // as in GatherContextParams; cache_dtype is then kE4M3FN
  DType q_dtype;
  DType cache_dtype;
  DType out_dtype;
};

struct SparseDecodeParams {
  const void* q_latent;      // as in DecodeParams, with its stride
  const void* q_rope;        // likewise
  int64_t q_latent_stride;   // D when q came as one array, else L
  int64_t q_rope_stride;     // D or R
  const void* cache;         // [layers, slots, D] in cache_dtype; where ds_mla [layers, slots, 656] bytes
  const int32_t* layer;      // [], or null when layers == 1; outside [0, layers): every row is empty
  const int32_t* indices;    // [T, K]: slots; one outside [0, slots) is no token
  const int32_t* topk_lens;  // [T]: how many of a token's indices count; null: all K
  const float* sink;         // [H]: a natural-log logit that joins the denominator and not lse; null: none
  const float* q_scale;      // [], or null: 1
  const float* k_scale;      // [k_scales], or null: 1
  void* out;                 // [T, H, L] in out_dtype
  float* lse;                // [T, H], natural log; an empty row has out 0 and lse -inf
  float* partial_out;        // [splits, T, H, L], scratch; not used when splits == 1
  float* partial_lse;        // [splits, T, H], scratch, natural log
  int64_t slots;             // pages * P of a layer
  int32_t layers;
  int32_t tokens;     // T
  int32_t heads;      // H
  int32_t topk;       // K
  int32_t splits;     // pieces that a token's indices are cut into
  int32_t tile_rows;  // heads that one piece of work handles
  int32_t k_scales;   // 1 or layers
  int32_t variant;    // as in DecodeParams
  float scale;        // of the scores, before softmax (multiplied with q_scale and k_scale)
  bool ds_mla;        // as in GatherContextParams; cache_dtype is then kE4M3FN
  DType q_dtype;
  DType cache_dtype;
  DType out_dtype;
};

struct UpdateCacheParams {
  void* cache;                  // [layers, pages, P, D] in cache_dtype, or, where ds_mla, [layers, pages, P, 656]
                                // bytes; updated in place
  const void* kv_c;             // [T, L] in input_dtype
  const void* k_pe;             // [T, R] in input_dtype
  const int32_t* slot_mapping;  // [T]: page * P + offset; outside [0, pages * P): skipped. Of duplicates the last wins.
  const int32_t* layer;         // [], or null when layers == 1; outside [0, layers): nothing is written
  const float* k_scale;         // [k_scales], or null: 1; what is stored is value / k_scale
  int32_t* owners;              // [owner_slots, 2], scratch of the duplicate search; null when owner_slots == 0
  int64_t pages;
  int32_t owner_slots;  // 0, or a power of two of at least 2 * T
  int32_t layers;
  int32_t page_size;
  int32_t tokens;  // T
  int32_t k_scales;
  bool saturate;             // fp8: clamp to the largest finite value instead of NaN
  bool ds_mla;               // as in GatherContextParams; cache_dtype is then kE4M3FN
  bool power_of_two_scales;  // of ds_mla, whose scales are max(amax, 1e-4) / 448: rounded up to a power of two
  DType input_dtype;
  DType cache_dtype;
};

struct MergeStatesParams {
  const void* out_a;   // [rows, width] in dtype
  const float* lse_a;  // [rows], natural log; -inf, +inf and NaN mark an empty side whose out is not read
  const void* out_b;   // [rows, width]
  const float* lse_b;  // [rows]
  void* out;           // [rows, width] in dtype
  float* lse;          // [rows]
  int64_t rows;
  int32_t width;
  DType dtype;
};

struct PrefillParams {
  const void* q;              // [T, H, 192] in dtype
  const void* k;              // row (s, h) starts (s * H + h) * k_stride elements on, in dtype: 128 columns of nope,
                              // then, where k_pe is null, 64 of rope
  const void* k_pe;           // null, or rope keys of all heads in dtype: row s starts k_pe_offset + s * k_pe_stride
                              // elements on, R long
  int64_t k_stride;           // 192; beside a k_pe 128, or 256 in a whole up-projection
  int64_t k_pe_stride;        // R, or D for gathered latent rows
  int64_t k_pe_offset;        // 0, or L
  const void* v;              // row (s, h) starts v_offset + (s * H + h) * v_stride elements, 128 long, in v_dtype;
                              // or, where v_tiled, [ceil(S / 16), H, 128, 16] as kValueTile says
  int64_t v_stride;           // 128, or 256 in a whole up-projection
  int64_t v_offset;           // 0, or 128
  const int32_t* cu_q_lens;   // [B + 1]: queries [cu_q_lens[b], cu_q_lens[b + 1]) of T are request b's
  const int32_t* cu_kv_lens;  // [B + 1]: likewise its keys of S
  const uint32_t* key_mask;   // [ceil(S / 32)]: bit s % 32 of word s / 32 clear: nobody sees key s. Null: all are seen
  const float* q_scale;       // [], or null: 1; of fp8 arrays alone, as the next two
  const float* k_scale;
  const float* v_scale;
  void* out;       // [T, H, 128] in out_dtype; float32, and updated in place, where `merge`
  float* lse;      // [T, H], natural log
  int64_t stored;  // S
  int32_t tokens;  // T
  int32_t batch;
  int32_t heads;
  int32_t variant;  // as in DecodeParams
  float scale;      // of the scores, before softmax (multiplied with q_scale and k_scale)
  bool causal;      // query i of n sees keys j <= m - n + i of its m
  bool merge;       // out and lse hold a state that the result is merged into; rows without keys stay as they are
  DType dtype;      // of q and k
  DType v_dtype;    // dtype, or bf16 beside fp8
  bool v_tiled;     // of e4m3fn alone
  DType out_dtype;
  void* scratch;          // for the plan and the partial results of 8-bit kernels on gfx950
  int64_t scratch_bytes;  // at least what kernels/prefill/gfx950/scratch.h tells, where that is not 0
};

struct PackKvParams {
  const void* kv_up;            // [T, H, 2 * 128] in input_dtype: nope key, then value
  const void* k_pe;             // row t starts at k_pe_offset + t * k_pe_stride elements, R long, in k_pe_dtype
  const float* k_scale;         // [], or null: 1; the scale of an fp8 k_pe
  const float* packed_k_scale;  // [], or null: 1; fp8 output only: stored k is value / packed_k_scale
  const float* packed_v_scale;  // [], or null: 1
  void* k;                      // [T, H, 192] in output_dtype
  void* v;                      // [T, H, 128] in output_dtype, or [ceil(T / 16), H, 128, 16] as kValueTile says where
                                // v_tiled; null: keys alone
  int64_t k_pe_stride;          // R, or D for gathered latent rows
  int64_t k_pe_offset;          // 0, or L
  int64_t tokens;
  int32_t heads;
  bool saturate;
  bool v_tiled;
  DType input_dtype;
  DType k_pe_dtype;
  DType output_dtype;
};

// One chunk of cached context, gathered into a workspace of W rows.
struct GatherContextParams {
  const void* cache;          // [layers, pages, P, D] in cache_dtype; where ds_mla [layers, pages, P, 656] bytes
  const int32_t* layer;       // [], or null when layers == 1; outside [0, layers): every row is zero
  const float* k_scale;       // [k_scales], or null: 1; of a per-tensor fp8 cache, multiplied with its values
  const int32_t* page_table;  // [B, max_pages]; a row on a page outside [0, pages), or past max_pages, is zero
  const int32_t* starts;      // [B]: the first token of request b's piece, counted from the start of its context
  const int32_t* cu_kv_lens;  // [B + 1]: where in the workspace the pieces begin and end
  void* latent;               // [W, L] in output_dtype; rows that belong to no piece are zero
  void* rope;                 // [W, R] in output_dtype
  int64_t pages;
  int32_t rows;  // W
  int32_t layers;
  int32_t page_size;
  int32_t max_pages;
  int32_t batch;
  int32_t k_scales;  // 1 or layers
  bool ds_mla;       // a row is 512 e4m3fn values, 4 fp32 scales (one for each 128), 64 bf16 rope values
  DType cache_dtype;
  DType output_dtype;
};

}  // namespace mla
