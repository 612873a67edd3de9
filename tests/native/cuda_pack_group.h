// The driver's groups for pack_kv and pack_kv_fp8, bit for bit.
#pragma once

#include <algorithm>

#include "tests/native/cuda_host_dtypes.h"

namespace mla::test {

struct PackShapes {
  DType input = DType::kBF16, rope = DType::kBF16, output = DType::kBF16;
  int64_t tokens = 65;
  int32_t heads = 24;
  bool gathered = false;  // the rope key is the end of latent rows
  bool saturate = false;
  bool tiled = false;                                         // values
  float k_scale = 1, packed_k_scale = 1, packed_v_scale = 1;  // 1: no array
  // Of 1024 tokens, nope keys, values and rope keys each see every 16-bit code; or bits of any kind.
  bool all_inputs = false;
  uint64_t seed = 1;

  bool values() const { return output != input; }
  std::string text() const {
    return std::string("pack_kv of ") + name_of(input) + ", rope " + name_of(rope) + ", to " + name_of(output) + ", " +
           std::to_string(tokens) + " tokens x " + std::to_string(heads) + " heads" + (gathered ? ", gathered" : "") +
           (saturate ? ", saturating" : "") + (tiled ? ", values in tiles" : "") + ", scales " +
           std::to_string(k_scale) + " " + std::to_string(packed_k_scale) + " " + std::to_string(packed_v_scale);
  }
};

// Codes in their order, or random values.
inline Bytes pack_input(DType dtype, int64_t count, bool all_inputs, uint64_t seed) {
  if (!all_inputs) return noise_of(dtype, count, seed);
  Bytes bytes(count * size_of(dtype));
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = dtype == DType::kF32 ? mix(seed + i) : static_cast<uint32_t>(i);
    std::memcpy(bytes.data() + i * size_of(dtype), &bits, size_of(dtype));
  }
  return bytes;
}

// Where a value lies that is packed in tiles, as kValueTile says.
inline int64_t tiled_at(int64_t token, int64_t head, int64_t column, int64_t heads) {
  constexpr int kPositions[kValueTile] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};  // of tokens
  return ((token / kValueTile * heads + head) * kNope + column) * kValueTile + kPositions[token % kValueTile];
}

inline void check_pack(const PackShapes& s) {
  constexpr int64_t kGuard = 4096;
  const int64_t in = size_of(s.input), pe = size_of(s.rope), out = size_of(s.output), rows = s.tokens * s.heads;
  const int64_t width = s.gathered ? kWidth : kRope, offset = width - kRope;
  const int64_t v_rows = s.tiled ? (s.tokens + kValueTile - 1) / kValueTile * kValueTile * s.heads : rows;
  Bytes up = pack_input(s.input, rows * 2 * kNope, s.all_inputs, s.seed);
  // Low bytes are below 128 in the nope part and from 128 in the values: in half of the rows they change places.
  for (int64_t row = rows / 2; s.all_inputs && row < rows; ++row) {
    uint8_t* const nope = up.data() + row * 2 * kNope * in;
    std::swap_ranges(nope, nope + kNope * in, nope + kNope * in);
  }
  const Bytes rope = pack_input(s.rope, s.tokens * width, s.all_inputs, s.seed + 1);
  const Array<uint8_t> device_up(up), device_rope(rope);
  const Array<float> scales(std::vector<float>{s.k_scale, s.packed_k_scale, s.packed_v_scale});
  Array<uint8_t> k(rows * kHeadDim * out + kGuard), v(v_rows * kNope * out + kGuard);
  PackKvParams p{};
  p.kv_up = device_up.data();
  p.k_pe = device_rope.data();
  p.k_scale = s.k_scale == 1 ? nullptr : scales.data();
  p.packed_k_scale = s.packed_k_scale == 1 ? nullptr : scales.data() + 1;
  p.packed_v_scale = s.packed_v_scale == 1 ? nullptr : scales.data() + 2;
  p.k = k.data();
  p.v = s.values() ? v.data() : nullptr;
  p.k_pe_stride = width;
  p.k_pe_offset = offset;
  p.tokens = s.tokens;
  p.heads = s.heads;
  p.saturate = s.saturate;
  p.v_tiled = s.tiled;
  p.input_dtype = s.input;
  p.k_pe_dtype = s.rope;
  p.output_dtype = s.output;
  check(pack_kv(p, device()));

  Bytes expected_k(rows * kHeadDim * out), expected_v(s.values() ? v_rows * kNope * out : 0);
  for (int64_t row = 0; row < rows; ++row) {
    const uint8_t* from = up.data() + row * 2 * kNope * in;
    const uint8_t* shared = rope.data() + (row / s.heads * width + offset) * pe;
    uint8_t* to = expected_k.data() + row * kHeadDim * out;
    for (int c = 0; c < kNope; ++c) {
      convert_value(s.output, to + c * out, s.input, from + c * in, 1, s.packed_k_scale, s.saturate);
      if (!s.values()) continue;
      const int64_t token = row / s.heads, head = row % s.heads;
      const int64_t at = s.tiled ? tiled_at(token, head, c, s.heads) : row * kNope + c;
      convert_value(s.output, expected_v.data() + at * out, s.input, from + (kNope + c) * in, 1, s.packed_v_scale,
                    s.saturate);
    }
    for (int c = 0; c < kRope; ++c) {
      convert_value(s.output, to + (kNope + c) * out, s.rope, shared + c * pe, s.k_scale, s.packed_k_scale, s.saturate);
    }
  }
  const Bytes actual_k = k.download(), actual_v = v.download();
  const int64_t wrong_k = first_difference(s.output, actual_k, expected_k);
  const int64_t wrong_v = first_difference(s.output, actual_v, expected_v);
  require(wrong_k < 0, s.text() + ": element " + std::to_string(wrong_k) + " of k");
  require(wrong_v < 0, s.text() + ": element " + std::to_string(wrong_v) + " of v");
  require(is_poison(actual_k, expected_k.size()) && is_poison(actual_v, expected_v.size()),
          s.text() + ": written behind the results");
}

// Every dtype, every code of the 16-bit ones and of fp8 rope keys, with and without scales.
inline std::string pack_casts_group(bool quick) {
  int count = 0;
  for (DType input : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (DType rope : {input, DType::kE4M3FN, DType::kE4M3FNUZ}) {
      for (DType output : {input, DType::kE4M3FN, DType::kE4M3FNUZ}) {
        for (bool scaled : {false, true}) {
          for (bool saturate : {false, true}) {
            const bool packed = output != input, fp8_rope = rope != input;
            if ((saturate && !packed) || (scaled && !packed && !fp8_rope)) continue;
            PackShapes s;
            s.input = input;
            s.rope = rope;
            s.output = output;
            s.heads = 1;
            s.tokens = quick ? 33 : 1024;  // 65,536 of the rope's codes, and four times those of the rest
            s.saturate = saturate;
            s.all_inputs = true;
            s.tiled = output == DType::kE4M3FN && rope == input;
            if (scaled) {
              s.k_scale = fp8_rope ? 0.37f : 1;
              s.packed_k_scale = packed ? 0.73f : 1;
              s.packed_v_scale = packed ? 3 : 1;
            }
            check_pack(s);
            ++count;
          }
        }
      }
    }
  }
  return std::to_string(count) + " kinds";
}

inline std::string pack_group(bool quick) {
  int count = 0;
  for (int32_t heads : {1, 3, 12, 24, 96, 128}) {
    for (int64_t tokens : {0, 1, 31, quick ? 40 : 333}) {
      PackShapes s;
      s.seed = ++count;
      s.heads = heads;
      s.tokens = tokens;
      s.gathered = count % 2 == 0;
      s.input = s.rope = s.output = count % 3 == 0 ? DType::kF16 : count % 5 == 0 ? DType::kF32 : DType::kBF16;
      if (count % 4 > 1) s.output = DType::kE4M3FN;
      check_pack(s);
      s.rope = DType::kE4M3FN;
      s.tiled = s.output == DType::kE4M3FN;
      check_pack(s);
    }
  }
  return std::to_string(2 * count) + " calls";
}

}  // namespace mla::test
