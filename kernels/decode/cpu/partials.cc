#include "kernels/decode/cpu/partials.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/vector.h"

namespace mla::cpu {
namespace {

using namespace mla::portable;

constexpr float kEmpty = -std::numeric_limits<float>::infinity();

}  // namespace

void write_empty(const OutputRow& row) {
  *row.lse = kEmpty;
  std::memset(row.out, 0, kLatent * bytes_of(row.dtype));
}

void merge_partials(const Partials& partials, const float* sink, const OutputRow& row) {
  float largest = kEmpty;  // of those that are numbers
  bool empty = true;
  for (int32_t i = 0; i < partials.count; ++i) {
    const float lse = partials.lse[i * partials.stride];
    if (lse != kEmpty) empty = false;
    largest = std::fmax(largest, lse);
  }
  if (empty) return write_empty(row);

  alignas(16) float sums[kLatent] = {};
  float total = 0;
  for (int32_t i = 0; i < partials.count; ++i) {
    const float lse = partials.lse[i * partials.stride];
    if (lse == kEmpty) continue;
    const float weight = std::exp(lse - largest);
    const float* const out = partials.out + i * partials.stride * kLatent;
    total += weight;
    for (int64_t c = 0; c < kLatent; c += kLanes) store(sums + c, load(sums + c) + load(out + c) * weight);
  }
  *row.lse = largest + std::log(total);
  if (sink != nullptr) total += std::exp(*sink - largest);
  with_dtype(row.dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::kValue;
    char* const out = static_cast<char*>(row.out);
    for (int64_t c = 0; c < kLatent; c += kLanes) {
      store_from_float<kType>(out + c * bytes_of(kType), load(sums + c) / total);
    }
  });
}

}  // namespace mla::cpu
