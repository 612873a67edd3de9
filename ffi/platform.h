// What handlers share on every platform: the device of a call, XLA's dtypes as ours, and checks with values in the
// text.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>

#include "kernels/device.h"
#include "kernels/entry.h"
#include "kernels/params.h"
#include "xla/ffi/api/ffi.h"

#if defined(JAX_MLA_CPU)
#include "ffi/parallel_for.h"
#endif

namespace ffi = xla::ffi;

namespace mla {

using AnyBuffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

inline ffi::Error to_ffi(const Error& error) {
  return error.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kInternal, error);
}

inline ffi::Error invalid(const std::string& text) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, text); }

inline std::optional<DType> dtype_of(const AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32: return DType::kF32;
    case ffi::DataType::BF16: return DType::kBF16;
    case ffi::DataType::F16: return DType::kF16;
    case ffi::DataType::F8E4M3FN: return DType::kE4M3FN;
    case ffi::DataType::F8E4M3FNUZ: return DType::kE4M3FNUZ;
    default: return std::nullopt;
  }
}

inline std::string shape_text(const AnyBuffer& buffer) {
  std::string text = "[";
  for (int64_t size : buffer.dimensions()) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// An operand that may be absent travels as an empty array.
template <typename T>
const T* optional_data(const AnyBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<const T*>(buffer.untyped_data());
}

template <typename T>
T* data(const AnyBuffer& buffer) {
  return static_cast<T*>(buffer.untyped_data());
}

// Wrappers check shapes while tracing; a handler checks once more what would make a kernel leave its buffers, for
// whoever calls a target directly.
class Checks {
 public:
  Checks& shape(const char* name, const AnyBuffer& buffer, std::initializer_list<int64_t> expected) {
    const auto actual = buffer.dimensions();
    if (actual.size() == expected.size() && std::equal(actual.begin(), actual.end(), expected.begin())) return *this;
    std::string wanted;
    for (int64_t size : expected) wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
    return that(false, std::string(name) + " has shape " + shape_text(buffer) + ", expected [" + wanted + "]");
  }

  Checks& rank(const char* name, const AnyBuffer& buffer, size_t expected) {
    return that(buffer.dimensions().size() == expected, std::string(name) + " has shape " + shape_text(buffer) +
                                                            ", expected " + std::to_string(expected) + " axes");
  }

  // At least `expected` elements of four bytes (or none, where `optional`).
  Checks& holds(const char* name, const AnyBuffer& buffer, int64_t expected, bool optional = false) {
    const int64_t count = buffer.element_count();
    return that(
        ffi::ByteWidth(buffer.element_type()) == 4 && (count >= expected || (optional && count == 0)),
        std::string(name) + " has " + std::to_string(count) + " elements, expected " + std::to_string(expected));
  }

  Checks& floating(const char* name, const AnyBuffer& buffer) {
    return that(dtype_of(buffer).has_value(), std::string(name) + " has an unsupported dtype (XLA's number " +
                                                  std::to_string(static_cast<int>(buffer.element_type())) + ")");
  }

  Checks& that(bool condition, const std::string& text) {
    if (!condition && error_.empty()) error_ = text;
    return *this;
  }

  bool failed() const { return !error_.empty(); }
  ffi::Error error() const { return invalid("jax_mla: " + error_); }

 private:
  std::string error_;
};

}  // namespace mla

// Lets a handler take `mla::Device` as its context on every platform.
namespace xla::ffi {

template <>
struct CtxDecoding<mla::Device> {
  using Type = mla::Device;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
#if !defined(JAX_MLA_CPU)
    auto stream = CtxDecoding<PlatformStream<void*>>::Decode(api, context, diagnostic);
    auto ordinal = CtxDecoding<DeviceOrdinal>::Decode(api, context, diagnostic);
    if (!stream || !ordinal) return std::nullopt;
    return mla::Device{*stream, *ordinal};
#else
    auto pool = CtxDecoding<ThreadPool>::Decode(api, context, diagnostic);
    if (!pool) return std::nullopt;
    const auto threads = static_cast<int32_t>(pool->num_threads());
    return mla::Device{mla::parallel_for_on(*std::move(pool)), threads};
#endif
  }
};

}  // namespace xla::ffi
