#include "kernels/cpu/convert.h"

#include "kernels/cpu/vector.h"

namespace mla::cpu {
namespace {

using namespace mla::portable;

template <DType kTarget>
Float clamped(Float x) {
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

}  // namespace

ConvertRow convert_row(DType target, DType source) {
  ConvertRow result = nullptr;
  with_dtype(target, [&](auto to) {
    with_dtype(source, [&](auto from) { result = &convert<decltype(to)::kValue, decltype(from)::kValue>; });
  });
  return result;
}

int64_t size_of(DType type) { return bytes_of(type); }

}  // namespace mla::cpu
