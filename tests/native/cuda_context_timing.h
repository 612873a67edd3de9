// Device times of the cache's updates and of what chunked context is made of beside its attention, and the share of the
// copy's bandwidth.
#pragma once

#include "tests/native/cuda_timing.h"

namespace mla::test {

inline void print_bandwidth(const std::string& name, double us, double bytes, double ceiling) {
  std::printf("%-62s %8.1f us %5.2f TB/s, %3.0f%% of a copy\n", name.c_str(), us, bytes / us * 1e-6,
              bytes / us * 1e-4 / ceiling);
  std::fflush(stdout);
}

struct PackTiming {
  DType input, output;
  int64_t width = kRope;
  bool tiled = false;   // values
  bool scaled = false;  // by no power of two
};

inline void time_pack(const PackTiming& t, double ceiling) {
  constexpr int64_t kTokens = 65536;
  constexpr int32_t kHeads = 24;
  const int64_t in = size_of(t.input), out = size_of(t.output), rows = kTokens * kHeads;
  const bool values = t.input != t.output;
  const Array<uint8_t> up(rows * 2 * kNope * in), rope(kTokens * t.width * in);
  const Array<float> scale(std::vector<float>{0.37f});
  check(cudaMemsetAsync(up.data(), 0x3C, up.size(), stream_of(device())));
  check(cudaMemsetAsync(rope.data(), 0x3C, rope.size(), stream_of(device())));
  Array<uint8_t> k(rows * kHeadDim * out), v(rows * kNope * out);
  PackKvParams p{};
  p.kv_up = up.data();
  p.k_pe = rope.data();
  p.k = k.data();
  p.v = values ? v.data() : nullptr;
  p.packed_k_scale = p.packed_v_scale = t.scaled ? scale.data() : nullptr;
  p.k_pe_stride = t.width;
  p.k_pe_offset = t.width - kRope;
  p.tokens = kTokens;
  p.heads = kHeads;
  p.v_tiled = t.tiled;
  p.input_dtype = p.k_pe_dtype = t.input;
  p.output_dtype = t.output;
  const double us = time_calls(5, [&](int) { check(pack_kv(p, device())); });
  const int64_t read = rows * (values ? 2 : 1) * kNope * in + kTokens * kRope * in;
  const int64_t written = rows * (kHeadDim + (values ? kNope : 0)) * out;
  print_bandwidth(std::string("pack_kv, 65536 tokens x 24 heads, ") + short_name(t.input) + " to " +
                      short_name(t.output) + (t.width == kWidth ? ", gathered" : "") + (t.tiled ? ", tiles" : "") +
                      (t.scaled ? ", scaled" : ""),
                  us, static_cast<double>(read + written), ceiling);
}

// Layers take turns, so that no call finds its rows in the L2.
inline void time_gather(DType cache, bool ds_mla, DType output, double ceiling) {
  constexpr int32_t kRows = 65536, kPage = 64, kBatch = 4, kPages = kRows / kPage;
  const int64_t row_bytes = ds_mla ? kDsMlaBytes : kWidth * size_of(cache), out = size_of(output);
  const auto layers = static_cast<int32_t>(200e6 / (static_cast<double>(kRows) * row_bytes)) + 1;
  const Array<uint8_t> data(layers * kRows * row_bytes);
  check(cudaMemsetAsync(data.data(), 0x3C, data.size(), stream_of(device())));
  std::vector<int32_t> pages(kPages), numbers(layers), lens;
  std::iota(pages.begin(), pages.end(), 0);
  std::iota(numbers.begin(), numbers.end(), 0);
  Random random(3);
  std::shuffle(pages.begin(), pages.end(), random);
  for (int32_t b = 0; b <= kBatch; ++b) lens.push_back(b * (kRows / kBatch));
  const Array<int32_t> table(pages), layer(numbers), cu_kv_lens(lens), starts(std::vector<int32_t>(kBatch, 0));
  const Array<float> scale(std::vector<float>{0.5f});
  Array<uint8_t> latent(kRows * kLatent * out), rope(kRows * kRope * out);
  GatherContextParams p{};
  p.cache = data.data();
  p.k_scale = !ds_mla && size_of(cache) == 1 ? scale.data() : nullptr;
  p.page_table = table.data();
  p.starts = starts.data();
  p.cu_kv_lens = cu_kv_lens.data();
  p.latent = latent.data();
  p.rope = rope.data();
  p.pages = kPages;
  p.rows = kRows;
  p.layers = layers;
  p.page_size = kPage;
  p.max_pages = kPages / kBatch;
  p.batch = kBatch;
  p.k_scales = 1;
  p.ds_mla = ds_mla;
  p.cache_dtype = cache;
  p.output_dtype = output;
  const double us = time_calls(2 * layers, [&](int i) {
    p.layer = layer.data() + i % layers;
    check(gather_context(p, device()));
  });
  print_bandwidth(std::string("gather_context, 65536 tokens, ") + (ds_mla ? "fp8_ds_mla" : short_name(cache)) + " to " +
                      short_name(output),
                  us, static_cast<double>(kRows) * (row_bytes + kWidth * out), ceiling);
}

inline void time_merge(DType dtype, double ceiling) {
  constexpr int64_t kRows = 16384 * 24;
  const int64_t size = size_of(dtype);
  const Array<uint8_t> a(kRows * kNope * size), b(kRows * kNope * size);
  const Array<float> lse(std::vector<float>(kRows, 1.0f));
  Array<uint8_t> out(kRows * kNope * size);
  Array<float> merged(kRows);
  const MergeStatesParams p{a.data(), lse.data(), b.data(), lse.data(), out.data(), merged.data(), kRows, kNope, dtype};
  const double us = time_calls(5, [&](int) { check(merge_states(p, device())); });
  print_bandwidth(std::string("merge_states, 16384 tokens x 24 heads, ") + short_name(dtype), us,
                  static_cast<double>(kRows) * 3 * (kNope * size + 4), ceiling);
}

// update_cache of bf16 tokens into distinct slots of a cache of bf16, e4m3fn or fp8_ds_mla.
inline void time_update(DType stored, bool ds_mla, int32_t tokens, double ceiling) {
  const int64_t row_bytes = ds_mla ? kDsMlaBytes : kWidth * size_of(stored), slots = 2 * int64_t{tokens};
  const Array<uint8_t> cache(slots * row_bytes);
  const Array<__nv_bfloat16> kv_c(int64_t{tokens} * kLatent), k_pe(int64_t{tokens} * kRope);
  fill(kv_c.data(), kv_c.size(), 37);
  fill(k_pe.data(), k_pe.size(), 38);
  std::vector<int32_t> mapping(slots);
  for (int64_t i = 0; i < slots; ++i) mapping[i] = static_cast<int32_t>(i);
  std::shuffle(mapping.begin(), mapping.end(), Random(39));
  mapping.resize(tokens);
  const Array<int32_t> slot_mapping(mapping);
  int32_t owner_slots = 0;  // as the wrapper: a search among few tokens, a table for many
  if (tokens > 1024) {
    for (owner_slots = 1; owner_slots < 2 * tokens;) owner_slots *= 2;
  }
  const Array<int32_t> owners(size_t{2} * owner_slots);
  UpdateCacheParams p{};
  p.cache = cache.data();
  p.kv_c = kv_c.data();
  p.k_pe = k_pe.data();
  p.slot_mapping = slot_mapping.data();
  p.owners = owner_slots == 0 ? nullptr : owners.data();
  p.owner_slots = owner_slots;
  p.pages = slots;
  p.layers = p.page_size = 1;
  p.tokens = tokens;
  p.ds_mla = ds_mla;
  p.input_dtype = DType::kBF16;
  p.cache_dtype = stored;
  const double us = time_calls(10, [&](int) { check(update_cache(p, device())); });
  print_bandwidth(
      "update_cache, " + std::to_string(tokens) + " tokens, bf16 to " + (ds_mla ? "fp8_ds_mla" : short_name(stored)),
      us, static_cast<double>(tokens) * (kWidth * 2 + row_bytes), ceiling);
}

inline void time_updates() {
  const double ceiling = time_copy();
  std::printf("copy of 1 GiB: %.2f TB/s, read and written\n", ceiling);
  for (int32_t tokens : {65536, 1024, 128}) {
    time_update(DType::kBF16, /*ds_mla=*/false, tokens, ceiling);
    time_update(DType::kE4M3FN, /*ds_mla=*/false, tokens, ceiling);
    time_update(DType::kE4M3FN, /*ds_mla=*/true, tokens, ceiling);
  }
}

inline void time_context() {
  const double ceiling = time_copy();
  std::printf("copy of 1 GiB: %.2f TB/s, read and written\n", ceiling);
  for (int64_t width : {kRope, kWidth}) time_pack({DType::kBF16, DType::kBF16, width}, ceiling);
  for (bool scaled : {false, true}) {
    for (bool tiled : {false, true}) time_pack({DType::kBF16, DType::kE4M3FN, kRope, tiled, scaled}, ceiling);
  }
  time_pack({DType::kF32, DType::kE4M3FN, kRope, /*tiled=*/true}, ceiling);
  time_pack({DType::kF32, DType::kF32}, ceiling);
  for (DType cache : {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3FN}) {
    time_gather(cache, false, DType::kBF16, ceiling);
  }
  time_gather(DType::kE4M3FN, true, DType::kBF16, ceiling);
  for (DType dtype : {DType::kBF16, DType::kF32}) time_merge(dtype, ceiling);
}

}  // namespace mla::test
