// The row operations for one instruction set.
#pragma once

#include "kernels/cpu/rows.h"
#include "kernels/cpu/vector.h"

namespace mla::MLA_ISA {

using cpu::Conversion;
using cpu::ConvertRow;
using cpu::WeighRows;

template <DType kTarget>
MLA_INLINE Float clamped(Float x) {
  constexpr float kLargest = kTarget == DType::kE4M3FN ? 448.0f : 240.0f;
  x = x > broadcast(kLargest) ? broadcast(kLargest) : x;
  return x < broadcast(-kLargest) ? broadcast(-kLargest) : x;
}

template <DType kTarget, DType kSource>
void convert(void* target, const void* source, int64_t n, const Conversion& conversion) {
  const Float multiply = broadcast(conversion.multiply), divide = broadcast(conversion.divide);
  for (int64_t i = 0; i < n; i += kLanes) {
    Float x = load_as_float<kSource>(static_cast<const char*>(source) + i * bytes_of(kSource));
    x = x * multiply / divide;
    if constexpr (bytes_of(kTarget) == 1) {
      if (conversion.saturate) x = clamped<kTarget>(x);
    }
    store_from_float<kTarget>(static_cast<char*>(target) + i * bytes_of(kTarget), x);
  }
}

// kWhole vectors, or what is left of one.
template <DType kType, bool kWhole>
MLA_INLINE void weigh_some(char* out, const char* a, float weight_a, const char* b, float weight_b, int64_t count) {
  const auto load = [&](const char* row) {
    if constexpr (kWhole) return load_as_float<kType>(row);
    char some[kLanes * sizeof(float)] = {};
    memcpy(some, row, count * bytes_of(kType));
    return load_as_float<kType>(some);
  };
  Float sum = {};
  if (weight_a > 0) sum += load(a) * weight_a;
  if (weight_b > 0) sum += load(b) * weight_b;
  if constexpr (kWhole) return store_from_float<kType>(out, sum);
  char some[kLanes * sizeof(float)];
  store_from_float<kType>(some, sum);
  memcpy(out, some, count * bytes_of(kType));
}

template <DType kType>
void weigh(void* out, const void* a, float weight_a, const void* b, float weight_b, int64_t n) {
  auto* target = static_cast<char*>(out);
  auto* first = static_cast<const char*>(a);
  auto* second = static_cast<const char*>(b);
  constexpr int64_t kBytes = kLanes * bytes_of(kType);
  for (; n >= kLanes; n -= kLanes, target += kBytes, first += kBytes, second += kBytes) {
    weigh_some<kType, true>(target, first, weight_a, second, weight_b, kLanes);
  }
  if (n > 0) weigh_some<kType, false>(target, first, weight_a, second, weight_b, n);
}

inline ConvertRow convert_row(DType target, DType source) {
  ConvertRow result = nullptr;
  with_dtype(target, [&](auto to) {
    with_dtype(source, [&](auto from) { result = &convert<decltype(to)::kValue, decltype(from)::kValue>; });
  });
  return result;
}

inline WeighRows weigh_rows(DType type) {
  WeighRows result = nullptr;
  with_dtype(type, [&](auto tag) { result = &weigh<decltype(tag)::kValue>; });
  return result;
}

}  // namespace mla::MLA_ISA
