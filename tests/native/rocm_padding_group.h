// A build whose reduction lacks 24 heads pads such calls to 32, as the wrapper does: the same rows as those of the
// native count, and both are right.
#pragma once

#include "tests/native/rocm_decode_groups.h"

namespace mla::test {

// The same call with 32 heads, of which the last eight are the first again.
inline DecodeCase padded_to_32(const DecodeCase& native, Random& random) {
  DecodeShape s = native.shape;
  s.heads = 32;
  DecodeCase padded(s, random);
  padded.cache = native.cache;
  padded.page_table = native.page_table;
  padded.pages = native.pages;
  padded.max_pages = native.max_pages;
  for (int64_t token = 0; token < native.tokens; ++token) {
    for (int64_t head = 0; head < s.heads; ++head) {
      const int64_t to = (token * s.heads + head) * kWidth;
      const int64_t from = (token * native.shape.heads + head % native.shape.heads) * kWidth;
      for (int c = 0; c < kWidth; ++c) padded.q.set_code(to + c, native.q.code(from + c));
    }
  }
  return padded;
}

inline void test_padding() {
  Random random(25);
  const Device device = device_with(1);
  for (const AmdTypes& types : amd_types()) {
    for (int queries : {1, 2}) {
      DecodeShape s = amd_shape(types);
      s.max_q_len = queries;
      s.parts = 3;
      s.kv_lens = std::vector<int>{200, 0, 70};
      DecodeCase native(s, random);
      DecodeCase padded = padded_to_32(native, random);
      double worst = 0;
      if (gfx9::contains(gfx9::reducer_heads(), s.heads)) {
        check_decode(native, device, "24 heads", &worst);
      } else {
        report.expect_success(native.make_plan(device));
        const Error error = native.run(device);
        report.expect(error.find("does not take 24 heads") != Error::npos, "24 heads: '" + error + "'");
      }
      check_decode(padded, device, "24 heads padded to 32", &worst);
      if (!gfx9::contains(gfx9::reducer_heads(), s.heads)) continue;
      double difference = 0, norm = 0;
      for (int64_t row = 0; row < int64_t{native.tokens} * s.heads; ++row) {
        const int64_t there = row / s.heads * 32 + row % s.heads;
        report.expect(native.lse[row] == padded.lse[there] || std::fabs(native.lse[row] - padded.lse[there]) <= 1e-4,
                      "lse of a padded head: " + s.text());
        for (int c = 0; c < kLatent; ++c) {
          const double x = native.out.at(row * kLatent + c), y = padded.out.at(there * kLatent + c);
          difference += (x - y) * (x - y);
          norm += x * x;
        }
      }
      report.expect(std::sqrt(difference / norm) <= out_tolerance(types.q), "out of padded heads: " + s.text());
    }
  }
  report.group("24 heads, native and padded to 32");
}

}  // namespace mla::test
