// fp8_ds_mla tokens in an array of bytes, written down independently of the kernels. Poison is 0xff: NaN as e4m3, as
// fp32 and as bf16.
#pragma once

#include "tests/native/support.h"

namespace mla::test {

constexpr int64_t kDsMlaRopeByte = kLatent + kLatent / kDsMlaGroup * 4;

inline void fill_ds_mla(Array& cache, Random& random, int64_t token) {
  const int64_t first = token * kDsMlaBytes;
  for (int group = 0; group < kLatent / kDsMlaGroup; ++group) {
    const float scale = 0.1f + 0.2f * static_cast<float>(pick(random, 0, 4));
    std::memcpy(cache.bytes.data() + first + kLatent + group * 4, &scale, sizeof(scale));
    for (int c = 0; c < kDsMlaGroup; ++c) {
      const double x = (static_cast<double>(random()) + random() + random()) / 4294967296.0 - 1.5;
      cache.set_code(first + group * kDsMlaGroup + c, encode(DType::kE4M3FN, 1.4 * x / scale));
    }
  }
  for (int c = 0; c < kRope; ++c) {
    const uint32_t code = encode(DType::kBF16, static_cast<double>(random()) / 2147483648.0 - 1);
    std::memcpy(cache.bytes.data() + first + kDsMlaRopeByte + c * 2, &code, 2);
  }
}

inline double ds_mla_at(const Array& cache, int64_t token, int c) {
  const uint8_t* const bytes = cache.bytes.data() + token * kDsMlaBytes;
  if (c >= kLatent) {
    uint16_t code;
    std::memcpy(&code, bytes + kDsMlaRopeByte + (c - kLatent) * 2, sizeof(code));
    return value_of(DType::kBF16, code);
  }
  float scale;
  std::memcpy(&scale, bytes + kLatent + c / kDsMlaGroup * 4, sizeof(scale));
  return value_of(DType::kE4M3FN, bytes[c]) * scale;
}

}  // namespace mla::test
