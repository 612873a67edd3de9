// Two attention states over disjoint keys merged into one.
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/vector.h"
#include "kernels/entry.h"

namespace mla {
namespace {

using namespace mla::portable;

constexpr int64_t kGrainElements = 1 << 15;

template <DType kType>
Float load_some(const char* source, int64_t count) {
  char bytes[kLanes * sizeof(float)] = {};
  std::memcpy(bytes, source, count * bytes_of(kType));
  return load_as_float<kType>(bytes);
}

template <DType kType>
void store_some(char* target, Float x, int64_t count) {
  char bytes[kLanes * sizeof(float)];
  store_from_float<kType>(bytes, x);
  std::memcpy(target, bytes, count * bytes_of(kType));
}

// A side of weight 0 is empty: whatever it holds is not read.
template <DType kType>
void merge_row(const char* a, float weight_a, const char* b, float weight_b, char* out, int64_t width) {
  const auto weighted = [&](int64_t i, const auto& load) {
    Float sum = {};
    if (weight_a > 0) sum += load(a + i * bytes_of(kType)) * weight_a;
    if (weight_b > 0) sum += load(b + i * bytes_of(kType)) * weight_b;
    return sum;
  };
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    store_from_float<kType>(out + i * bytes_of(kType), weighted(i, load_as_float<kType>));
  }
  if (i < width) {
    const int64_t rest = width - i;
    const auto load = [&](const char* source) { return load_some<kType>(source, rest); };
    store_some<kType>(out + i * bytes_of(kType), weighted(i, load), rest);
  }
}

}  // namespace

Error merge_states(const MergeStatesParams& p, const Device& device) {
  const int64_t row_bytes = p.width * bytes_of(p.dtype);
  const int64_t grain = 1 + kGrainElements / (p.width + 1);
  cpu::parallel_ranges(device, p.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float lse_a = p.lse_a[row], lse_b = p.lse_b[row];
      const bool has_a = std::isfinite(lse_a), has_b = std::isfinite(lse_b);
      float weight_a = has_a ? 1.0f : 0.0f, weight_b = has_b ? 1.0f : 0.0f;
      float lse = has_a ? lse_a : has_b ? lse_b : -std::numeric_limits<float>::infinity();
      if (has_a && has_b) {
        const float largest = std::max(lse_a, lse_b);
        weight_a = std::exp(lse_a - largest);
        weight_b = std::exp(lse_b - largest);
        const float sum = weight_a + weight_b;
        lse = largest + std::log(sum);
        weight_a /= sum;
        weight_b /= sum;
      }
      p.lse[row] = lse;
      const char* const a = static_cast<const char*>(p.out_a) + row * row_bytes;
      const char* const b = static_cast<const char*>(p.out_b) + row * row_bytes;
      char* const out = static_cast<char*>(p.out) + row * row_bytes;
      with_dtype(p.dtype, [&](auto type) { merge_row<decltype(type)::kValue>(a, weight_a, b, weight_b, out, p.width); });
    }
  });
  return {};
}

}  // namespace mla
