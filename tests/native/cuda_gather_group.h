// The driver's groups for gather_context, bit for bit.
#pragma once

#include <numeric>

#include "tests/native/cuda_host_dtypes.h"

namespace mla::test {

struct GatherShapes {
  DType cache = DType::kBF16, output = DType::kBF16;
  bool ds_mla = false;
  int32_t page_size = 64, layers = 1, layer = 0, rows = 96;
  std::vector<int32_t> starts = {0, 0, 64}, lengths = {40, 0, 50};
  int32_t gap = 0;  // rows in front of the first piece
  bool bad_pages = false;
  std::vector<float> k_scales;

  int64_t row_bytes() const { return ds_mla ? kDsMlaBytes : kWidth * size_of(cache); }
  std::string text() const {
    std::string s = std::string("gather_context of ") + (ds_mla ? "fp8_ds_mla" : name_of(cache)) + " to " +
                    name_of(output) + ", page " + std::to_string(page_size) + ", layer " + std::to_string(layer) + "/" +
                    std::to_string(layers) + ", " + std::to_string(rows) + " rows, " + std::to_string(starts.size()) +
                    " requests" + (bad_pages ? ", bad pages" : "");
    for (float scale : k_scales) s += ", k_scale " + std::to_string(scale);
    return s;
  }
};

// NaN wherever no token of the call lies.
struct GatherCase {
  GatherShapes shapes;
  Bytes cache;
  std::vector<int32_t> table, cu_kv_lens;
  int32_t max_pages = 0;
  int64_t pages = 0;

  GatherCase(const GatherShapes& s, Random& random) : shapes(s), cu_kv_lens{s.gap} {
    const auto batch = static_cast<int32_t>(s.starts.size());
    for (int32_t b = 0; b < batch; ++b) {
      cu_kv_lens.push_back(cu_kv_lens.back() + s.lengths[b]);
      max_pages = std::max(max_pages, (s.starts[b] + s.lengths[b]) / s.page_size + 1);
    }
    pages = int64_t{batch} * max_pages + 2;
    std::vector<int32_t> order(pages);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    table.assign(order.begin(), order.begin() + int64_t{batch} * max_pages);
    cache.assign(s.layers * pages * s.page_size * s.row_bytes(), 0xFF);
    for (int32_t b = 0; b < batch; ++b) {
      for (int32_t token = s.starts[b]; token < s.starts[b] + s.lengths[b]; ++token) {
        for (int32_t layer = 0; layer < s.layers; ++layer) write_row(layer, slot(b, token), random);
      }
    }
    const int32_t outside[] = {-1, static_cast<int32_t>(pages), 0x7FFFFFFF, -0x7FFFFFFF - 1};
    for (int32_t& page : table) {
      if (s.bad_pages && pick(random, 0, 4) == 0) page = outside[pick(random, 0, 3)];
    }
  }

  int64_t slot(int32_t request, int64_t token) const {
    return int64_t{table[request * int64_t{max_pages} + token / shapes.page_size]} * shapes.page_size +
           token % shapes.page_size;
  }

  const uint8_t* row(int32_t layer, int64_t slot) const {
    return cache.data() + (layer * pages * shapes.page_size + slot) * shapes.row_bytes();
  }

  void write_row(int32_t layer, int64_t slot, Random& random) {
    auto* target = const_cast<uint8_t*>(row(layer, slot));
    const uint64_t seed = random();
    if (!shapes.ds_mla) {
      const Bytes values = noise_of(shapes.cache, kWidth, seed);
      std::memcpy(target, values.data(), values.size());
      return;
    }
    for (int c = 0; c < kLatent; ++c)
      target[c] = static_cast<uint8_t>(mix(seed + c) % 0x7F | (mix(seed + c) >> 24 & 0x80));
    for (int group = 0; group < kLatent / kDsMlaGroup; ++group) {
      set_value(DType::kF32, target + kLatent + group * 4, std::exp2(noise(seed + 1, group)));
    }
    const Bytes rope = noise_of(DType::kBF16, kRope, seed + 2);
    std::memcpy(target + kDsMlaBytes - 2 * kRope, rope.data(), rope.size());
  }

  // The row of the workspace's row w, or null.
  const uint8_t* source(int64_t w) const {
    if (shapes.layer < 0 || shapes.layer >= shapes.layers) return nullptr;
    int32_t request = 0;
    const auto batch = static_cast<int32_t>(shapes.starts.size());
    while (request < batch && w >= cu_kv_lens[request + 1]) ++request;
    if (request == batch || w < cu_kv_lens[request]) return nullptr;
    const int64_t token = int64_t{shapes.starts[request]} + w - cu_kv_lens[request];
    if (token < 0 || token / shapes.page_size >= max_pages) return nullptr;
    const int64_t page = table[request * int64_t{max_pages} + token / shapes.page_size];
    if (page < 0 || page >= pages) return nullptr;
    return row(shapes.layer, slot(request, token));
  }

  void expect(int64_t w, uint8_t* target) const {
    const uint8_t* from = source(w);
    const int64_t size = size_of(shapes.output);
    if (from == nullptr) return;
    const float scale = shapes.k_scales.empty() ? 1 : shapes.k_scales[shapes.k_scales.size() > 1 ? shapes.layer : 0];
    for (int c = 0; c < kWidth; ++c) {
      if (!shapes.ds_mla) {
        convert_value(shapes.output, target + c * size, shapes.cache, from + c * size_of(shapes.cache), scale, 1);
      } else if (c < kLatent) {
        const float own = value_at(DType::kF32, from + kLatent + c / kDsMlaGroup * 4);
        convert_value(shapes.output, target + c * size, DType::kE4M3FN, from + c, own, 1);
      } else {
        convert_value(shapes.output, target + c * size, DType::kBF16,
                      from + kDsMlaBytes - 2 * kRope + (c - kLatent) * 2, 1, 1);
      }
    }
  }

  void run() const {
    constexpr int64_t kGuard = 4096;
    const int64_t size = size_of(shapes.output);
    const Array<uint8_t> device_cache(cache);
    const Array<int32_t> device_table(table), lens(cu_kv_lens), starts(shapes.starts);
    const Array<int32_t> layer(std::vector<int32_t>{shapes.layer});
    const Array<float> scales(shapes.k_scales);
    Array<uint8_t> latent(int64_t{shapes.rows} * kLatent * size + kGuard),
        rope(int64_t{shapes.rows} * kRope * size + kGuard);
    GatherContextParams p{};
    p.cache = device_cache.data();
    p.layer = shapes.layers == 1 && shapes.layer == 0 ? nullptr : layer.data();
    p.k_scale = shapes.k_scales.empty() ? nullptr : scales.data();
    p.page_table = device_table.data();
    p.starts = starts.data();
    p.cu_kv_lens = lens.data();
    p.latent = latent.data();
    p.rope = rope.data();
    p.pages = pages;
    p.rows = shapes.rows;
    p.layers = shapes.layers;
    p.page_size = shapes.page_size;
    p.max_pages = max_pages;
    p.batch = static_cast<int32_t>(shapes.starts.size());
    p.k_scales = static_cast<int32_t>(shapes.k_scales.size());
    p.ds_mla = shapes.ds_mla;
    p.cache_dtype = shapes.ds_mla ? DType::kE4M3FN : shapes.cache;
    p.output_dtype = shapes.output;
    check(gather_context(p, device()));

    Bytes expected_latent(shapes.rows * kLatent * size), expected_rope(shapes.rows * kRope * size), row(kWidth * size);
    for (int64_t w = 0; w < shapes.rows; ++w) {
      std::fill(row.begin(), row.end(), 0);
      expect(w, row.data());
      std::memcpy(expected_latent.data() + w * kLatent * size, row.data(), kLatent * size);
      std::memcpy(expected_rope.data() + w * kRope * size, row.data() + kLatent * size, kRope * size);
    }
    const Bytes actual_latent = latent.download(), actual_rope = rope.download();
    const int64_t wrong_latent = first_difference(shapes.output, actual_latent, expected_latent);
    const int64_t wrong_rope = first_difference(shapes.output, actual_rope, expected_rope);
    require(wrong_latent < 0, shapes.text() + ": latent of row " + std::to_string(wrong_latent / kLatent));
    require(wrong_rope < 0, shapes.text() + ": rope key of row " + std::to_string(wrong_rope / kRope));
    require(is_poison(actual_latent, expected_latent.size()) && is_poison(actual_rope, expected_rope.size()),
            shapes.text() + ": written behind the results");
  }
};

// f(shapes) with each layout and output.
template <class F>
void for_layouts(F f) {
  for (DType output : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (DType cache : {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3FN, DType::kE4M3FNUZ}) {
      GatherShapes s;
      s.output = output;
      s.cache = cache;
      f(s);
    }
    GatherShapes s;
    s.output = output;
    s.ds_mla = true;
    f(s);
  }
}

inline std::string gather_group(bool quick) {
  Random random(5);
  int count = 0;
  for_layouts([&](GatherShapes s) {
    const bool fp8 = !s.ds_mla && size_of(s.cache) == 1;
    for (int32_t page_size : {1, 16, 64, 100}) {
      if (quick && page_size == 100) continue;
      for (bool layered : {false, true}) {
        s.page_size = page_size;
        s.layers = layered ? 2 : 1;
        s.layer = layered ? pick(random, -1, 2) : 0;
        s.bad_pages = pick(random, 0, 1);
        s.gap = pick(random, 0, 2) ? 0 : 5;
        s.k_scales.clear();
        if (fp8 && count % 3 > 0) s.k_scales = layered ? std::vector<float>{0.5f, 2.0f} : std::vector<float>{2.0f};
        s.starts.clear();
        s.lengths.clear();
        const int32_t batch = quick ? 3 : pick(random, 1, 5) == 1 ? 300 : pick(random, 1, 6);
        s.rows = quick ? 40 : pick(random, 90, 500);
        for (int32_t b = 0, left = s.rows - s.gap; b < batch; ++b) {
          s.starts.push_back(b == 0 ? pick(random, 0, 3) * page_size : 0);
          s.lengths.push_back(std::min(left, batch == 300 ? pick(random, 0, 2) : pick(random, 0, 120)));
          left -= s.lengths.back();
        }
        GatherCase(s, random).run();
        ++count;
      }
    }
  });
  return std::to_string(count) + " calls";
}

// Plans and lengths that belong to nothing: rows of zeros or of other tokens, as the rule says, and no access outside.
inline std::string gather_garbage_group(bool quick) {
  Random random(6);
  const int count = quick ? 10 : 200;
  for (int i = 0; i < count; ++i) {
    GatherCase problem(GatherShapes{}, random);
    const int32_t anything[] = {INT32_MIN, -1, 0, 7, 96, 1000, INT32_MAX};
    for (auto* values : {&problem.shapes.starts, &problem.cu_kv_lens}) {
      for (int32_t& value : *values) {
        if (pick(random, 0, 1)) value = anything[pick(random, 0, 6)];
      }
    }
    problem.run();
  }
  return std::to_string(count) + " calls";
}

// A few tokens at the end of a cache of more than 2^31 elements.
inline std::string gather_far_group(bool quick) {
  if (quick) return "left out";
  constexpr int32_t kPages = 60000, kPage = 64, kRows = 20;
  Array<uint8_t> cache(int64_t{kPages} * kPage * kWidth * 2);
  const Bytes rows = noise_of(DType::kBF16, kRows * kWidth, 3);
  const int64_t first = (int64_t{kPages - 1} * kPage + 3) * kWidth * 2;
  check(cudaMemcpyAsync(cache.data() + first, rows.data(), rows.size(), cudaMemcpyHostToDevice, stream_of(device())));
  const Array<int32_t> table(std::vector<int32_t>{kPages - 1}), starts(std::vector<int32_t>{3});
  const Array<int32_t> lens(std::vector<int32_t>{0, kRows});
  Array<uint8_t> latent(kRows * kLatent * 2), rope(kRows * kRope * 2);
  GatherContextParams p{};
  p.cache = cache.data();
  p.page_table = table.data();
  p.starts = starts.data();
  p.cu_kv_lens = lens.data();
  p.latent = latent.data();
  p.rope = rope.data();
  p.pages = kPages;
  p.rows = kRows;
  p.layers = p.batch = p.max_pages = 1;
  p.page_size = kPage;
  p.cache_dtype = p.output_dtype = DType::kBF16;
  check(gather_context(p, device()));
  const Bytes actual = latent.download();
  for (int64_t row = 0; row < kRows; ++row) {
    require(std::memcmp(actual.data() + row * kLatent * 2, rows.data() + row * kWidth * 2, kLatent * 2) == 0,
            "gather_context past 2^31 elements, row " + std::to_string(row));
  }
  return "the same bits";
}

}  // namespace mla::test
