// Two attention states over disjoint keys merged into one.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/rows.h"
#include "kernels/entry.h"

namespace mla {
namespace {

constexpr int64_t kGrainElements = 1 << 15;

}  // namespace

Error merge_states(const MergeStatesParams& p, const Device& device) {
  const cpu::WeighRows weigh = cpu::row_kernels().weigh(p.dtype);
  const int64_t row_bytes = p.width * cpu::size_of(p.dtype);
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
      weigh(out, a, weight_a, b, weight_b, p.width);  // a side of weight 0 is empty, and not read
    }
  });
  return {};
}

}  // namespace mla
