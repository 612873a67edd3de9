// Full keys: each head's nope part beside the rope part that all heads share; values apart when asked for.
#include <cstring>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/rows.h"
#include "kernels/entry.h"

namespace mla {
namespace {

constexpr int64_t kGrainBytes = 1 << 16;

// One dtype to another, or the bytes as they are.
struct Row {
  cpu::ConvertRow convert;  // null: copy
  cpu::Conversion conversion;
  int64_t target_size, source_size;  // bytes an element

  void operator()(char* target, const char* source, int64_t n) const {
    if (convert == nullptr) {
      std::memcpy(target, source, n * target_size);
    } else {
      convert(target, source, n, conversion);
    }
  }
};

Row row(DType target, DType source, float multiply, float divide, bool saturate) {
  const bool copy = target == source && multiply == 1.0f && divide == 1.0f;
  return {copy ? nullptr : cpu::row_kernels().convert(target, source),
          {multiply, divide, saturate},
          cpu::size_of(target),
          cpu::size_of(source)};
}

// One token's column of kNope values in its tile, as kValueTile says.
void store_in_tile(char* tile, int64_t token, const char* values) {
  const int64_t key = token % kValueTile, position = key % 8 / 2 * 4 + key / 8 * 2 + key % 2;
  for (int c = 0; c < kNope; ++c) tile[c * kValueTile + position] = values[c];
}

float scale_of(const float* scale) { return scale == nullptr ? 1.0f : *scale; }

}  // namespace

Error pack_kv(const PackKvParams& p, const Device& device) {
  if (p.v_tiled && p.output_dtype != DType::kE4M3FN) return "values in tiles are float8_e4m3fn";
  const float k_divide = scale_of(p.packed_k_scale), v_divide = scale_of(p.packed_v_scale);
  const Row nope = row(p.output_dtype, p.input_dtype, 1.0f, k_divide, p.saturate);
  const Row rope = row(p.output_dtype, p.k_pe_dtype, scale_of(p.k_scale), k_divide, p.saturate);
  const Row value = row(p.output_dtype, p.input_dtype, 1.0f, v_divide, p.saturate);
  const int64_t size = cpu::size_of(p.output_dtype);
  const int64_t heads = p.heads;

  const int64_t grain = 1 + kGrainBytes / (heads * kHeadDim * size);
  cpu::parallel_ranges(device, p.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const char* const pe = static_cast<const char*>(p.k_pe) + (p.k_pe_offset + t * p.k_pe_stride) * rope.source_size;
      char packed_pe[kRope * sizeof(float)];
      rope(packed_pe, pe, kRope);
      for (int64_t row = t * heads; row < (t + 1) * heads; ++row) {
        const char* const up = static_cast<const char*>(p.kv_up) + row * 2 * kNope * nope.source_size;
        char* const k = static_cast<char*>(p.k) + row * kHeadDim * size;
        nope(k, up, kNope);
        std::memcpy(k + kNope * size, packed_pe, kRope * size);
        if (p.v == nullptr) continue;
        const char* const from = up + kNope * nope.source_size;
        if (!p.v_tiled) {
          value(static_cast<char*>(p.v) + row * kNope * size, from, kNope);
          continue;
        }
        char values[kNope];
        char* const tile = static_cast<char*>(p.v) + (t / kValueTile * heads + row % heads) * kNope * kValueTile;
        value(values, from, kNope);
        store_in_tile(tile, t, values);
        std::memset(values, 0, kNope);
        for (int64_t behind = p.tokens; t == p.tokens - 1 && behind % kValueTile != 0; ++behind) {
          store_in_tile(tile, behind, values);
        }
      }
    }
  });
  return {};
}

}  // namespace mla
