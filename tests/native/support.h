// What the native tests share: threads, random values, number formats written down independently of the kernels.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/device.h"
#include "kernels/params.h"
#include "tests/native/memory.h"

namespace mla::test {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

#if defined(JAX_MLA_ROCM)
// The null stream. A test reads results when the call has returned: the stand-in's launches are synchronous, and so are
// those of a GPU with HIP_LAUNCH_BLOCKING=1.
inline int32_t ordinal = 0;
inline Device device_with(int) { return {nullptr, ordinal}; }
#else
inline Device device_with(int threads) {
  return {[threads](int64_t n, const std::function<void(int64_t)>& f) {
            std::atomic<int64_t> next{0};
            const auto work = [&] {
              for (int64_t i = next++; i < n; i = next++) f(i);
            };
            std::vector<std::thread> others;
            for (int t = 1; t < threads; ++t) others.emplace_back(work);
            work();
            for (auto& thread : others) thread.join();
          },
          threads};
}
#endif

using Random = std::mt19937;

inline int pick(Random& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

template <typename T>
T choose(Random& random, std::initializer_list<T> from) {
  return *(from.begin() + pick(random, 0, static_cast<int>(from.size()) - 1));
}

// ---- Formats: value of a code, and the code nearest to a value by search over all codes.

inline int size_of(DType type) { return type == DType::kF32 ? 4 : type == DType::kBF16 || type == DType::kF16 ? 2 : 1; }

inline bool is_fp8(DType type) { return size_of(type) == 1; }

inline const char* name_of(DType type) {
  switch (type) {
    case DType::kF32: return "f32";
    case DType::kBF16: return "bf16";
    case DType::kF16: return "f16";
    case DType::kE4M3FN: return "e4m3fn";
    case DType::kE4M3FNUZ: return "e4m3fnuz";
  }
  return "?";
}

struct Format {
  int mantissa, bias, exponent_bits;
};

inline Format format_of(DType type) {
  switch (type) {
    case DType::kBF16: return {7, 127, 8};
    case DType::kF16: return {10, 15, 5};
    case DType::kE4M3FN: return {3, 7, 4};
    default: return {3, 8, 4};
  }
}

inline double decode_code(DType type, uint32_t code) {
  if (type == DType::kF32) {
    float x;
    std::memcpy(&x, &code, sizeof(x));
    return x;
  }
  const Format format = format_of(type);
  const int bits = 1 + format.exponent_bits + format.mantissa;
  const double sign = code >> (bits - 1) ? -1 : 1;
  const int exponent = (code >> format.mantissa) & ((1 << format.exponent_bits) - 1);
  const int mantissa = code & ((1 << format.mantissa) - 1);
  if (type == DType::kE4M3FN && (code & 0x7f) == 0x7f) return kNaN;
  if (type == DType::kE4M3FNUZ && code == 0x80) return kNaN;
  if (bits == 16 && exponent == (1 << format.exponent_bits) - 1) return mantissa != 0 ? kNaN : sign * kInfinity;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - format.bias - format.mantissa);
  return sign * std::ldexp((1 << format.mantissa) + mantissa, exponent - format.bias - format.mantissa);
}

// The same from a table.
inline double value_of(DType type, uint32_t code) {
  static const auto tables = [] {
    std::vector<std::vector<double>> all(5);
    for (DType t : {DType::kBF16, DType::kF16, DType::kE4M3FN, DType::kE4M3FNUZ}) {
      for (uint32_t i = 0; i < (size_of(t) == 2 ? 65536u : 256u); ++i)
        all[static_cast<int>(t)].push_back(decode_code(t, i));
    }
    return all;
  }();
  return type == DType::kF32 ? decode_code(type, code) : tables[static_cast<int>(type)][code];
}

inline uint32_t nan_code(DType type) {
  switch (type) {
    case DType::kF32: return 0x7fc00000;
    case DType::kBF16: return 0x7fc0;
    case DType::kF16: return 0x7e00;
    case DType::kE4M3FN: return 0x7f;
    default: return 0x80;
  }
}

// Nearest, ties to the even code; what rounds past the largest finite value is infinity, or NaN where there is none.
inline uint32_t encode(DType type, double x) {
  if (type == DType::kF32) {
    const float narrow = static_cast<float>(x);
    uint32_t code;
    std::memcpy(&code, &narrow, sizeof(code));
    return code;
  }
  if (std::isnan(x)) return nan_code(type);
  const Format format = format_of(type);
  const uint32_t sign = std::signbit(x) ? 1u << (format.exponent_bits + format.mantissa) : 0;
  const uint32_t largest = type == DType::kBF16     ? 0x7f7f
                           : type == DType::kF16    ? 0x7bff
                           : type == DType::kE4M3FN ? 0x7e
                                                    : 0x7f;
  const double magnitude = std::fabs(x);
  uint32_t low = 0, high = largest;  // positive codes ascend with their values
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (value_of(type, middle) <= magnitude) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const double below = value_of(type, low);
  const double unit = low == largest ? below - value_of(type, low - 1) : value_of(type, low + 1) - below;
  const double rest = (magnitude - below) / unit;
  const uint32_t code = rest > 0.5 || (rest == 0.5 && low % 2 == 1) ? low + 1 : low;
  if (code > largest) return type == DType::kBF16 || type == DType::kF16 ? code | sign : nan_code(type);
  if (type == DType::kE4M3FNUZ && code == 0) return 0;
  return code | sign;
}

// An array of one dtype.
struct Array {
  DType type = DType::kF32;
  Buffer<uint8_t> bytes;

  Array() = default;
  Array(DType type, int64_t count) : type(type), bytes(count * size_of(type), 0xff) {}  // every element NaN, but fnuz's

  int64_t count() const { return static_cast<int64_t>(bytes.size()) / size_of(type); }
  void* data() { return bytes.data(); }

  uint32_t code(int64_t i) const {
    uint32_t code = 0;
    std::memcpy(&code, bytes.data() + i * size_of(type), size_of(type));
    return code;
  }
  void set_code(int64_t i, uint32_t code) { std::memcpy(bytes.data() + i * size_of(type), &code, size_of(type)); }
  double at(int64_t i) const { return value_of(type, code(i)); }
  void set(int64_t i, double x) { set_code(i, encode(type, x)); }

  void fill_random(Random& random, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      // A sum of uniforms is near enough to normal, and cheap.
      const double x = (static_cast<double>(random()) + random() + random()) / 4294967296.0 - 1.5;
      set(i, 1.4 * x);
    }
  }
  void fill_nan() {
    for (int64_t i = 0; i < count(); ++i) set_code(i, nan_code(type));
  }
};

// Counts what went wrong; prints a line a group.
class Report {
 public:
  void fail(const std::string& text) {
    ++failures_;
    if (++printed_ > 20) return;
    std::printf("  FAILED %s\n", text.c_str());
    text_ += text + "\n";
  }
  void expect(bool condition, const std::string& text) {
    ++checks_;
    if (!condition) fail(text);
  }
  void group(const std::string& name, const std::string& detail = "") {
    std::printf("%-34s %7lld checks %4lld failed  %s\n", name.c_str(), static_cast<long long>(checks_),
                static_cast<long long>(failures_), detail.c_str());
    std::fflush(stdout);
    all_failures_ += failures_;
    all_checks_ += checks_;
    checks_ = failures_ = printed_ = 0;
  }
  void expect_success(const std::string& error) { expect(error.empty(), error); }
  bool clean() const { return all_failures_ == 0; }
  // Of a driver that is a library: checks so far, and the first failures.
  int64_t all_checks() const { return all_checks_; }
  const std::string& text() const { return text_; }

 private:
  int64_t checks_ = 0, failures_ = 0, printed_ = 0, all_failures_ = 0, all_checks_ = 0;
  std::string text_;
};

inline Report report;
inline bool quick = false;  // fewer cases

}  // namespace mla::test
