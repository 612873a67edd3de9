// Vector instructions on one value a lane, compares, carries, conversions and moves between lanes.
#include "vector.h"

#include <algorithm>
#include <cmath>

#include "floats.h"

namespace gfx9 {
namespace {

uint32_t low24(uint32_t a) { return a & 0xffffff; }
int32_t signed24(int32_t a) { return static_cast<int32_t>(static_cast<uint32_t>(a) << 8) >> 8; }
uint32_t high32(uint64_t a) { return static_cast<uint32_t>(a >> 32); }

template <class T>
T median(T a, T b, T c) {
  return std::max(std::min(a, b), std::min(std::max(a, b), c));
}

// The smaller or the larger number; a NaN gives way to a number.
template <class T>
T minimum(T a, T b) {
  return a != a ? b : b != b ? a : b < a ? b : a;
}
template <class T>
T maximum(T a, T b) {
  return a != a ? b : b != b ? a : a < b ? b : a;
}

template <class T>
T to_integer(double value) {  // toward zero, saturating; a NaN gives 0
  if (std::isnan(value)) return 0;
  double low = std::numeric_limits<T>::min(), high = std::numeric_limits<T>::max();
  return value <= low    ? std::numeric_limits<T>::min()
         : value >= high ? std::numeric_limits<T>::max()
                         : static_cast<T>(value);
}

// Selects four of the eight bytes of {a, b} (b is the low half), or signs and constants.
uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t bytes = static_cast<uint64_t>(a) << 32 | b;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t choice = selector >> 8 * i & 0xff, byte;
    if (choice < 8)
      byte = bytes >> 8 * choice & 0xff;
    else if (choice < 12)
      byte = bytes >> (16 * (choice - 8) + 15) & 1 ? 0xff : 0;
    else
      byte = choice == 12 ? 0 : 0xff;
    result |= byte << 8 * i;
  }
  return result;
}

template <class T, class Name>
void float_basics(Registry& registry, Name type) {
  vector(registry, std::string("v_add_") + type, [](T a, T b) { return static_cast<T>(a + b); });
  vector(registry, std::string("v_sub_") + type, [](T a, T b) { return static_cast<T>(a - b); });
  vector(registry, std::string("v_subrev_") + type, [](T a, T b) { return static_cast<T>(b - a); });
  vector(registry, std::string("v_mul_") + type, [](T a, T b) { return static_cast<T>(a * b); });
  vector(registry, std::string("v_max_") + type, [](T a, T b) { return maximum(a, b); });
  vector(registry, std::string("v_min_") + type, [](T a, T b) { return minimum(a, b); });
  vector(registry, std::string("v_max3_") + type, [](T a, T b, T c) { return maximum(maximum(a, b), c); });
  vector(registry, std::string("v_min3_") + type, [](T a, T b, T c) { return minimum(minimum(a, b), c); });
  vector(registry, std::string("v_med3_") + type, [](T a, T b, T c) {
    if (a != a || b != b || c != c) return minimum(minimum(a, b), c);
    return median(a, b, c);
  });
}

Half fma16(Half a, Half b, Half c) {
  return static_cast<Half>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
}

// max3 with IEEE 754-2019's rule, that a NaN wins: gfx950's v_maximum3_f32 and v_minimum3_f32.
template <class T>
T maximum_or_nan(T a, T b) {
  return a != a ? a : b != b ? b : a < b ? b : a;
}

constexpr float kSmallestNormal = 0x1p-126f;
bool subnormal(double value) { return value != 0 && std::fabs(value) < kSmallestNormal; }
int exponent_field(float value) { return std::bit_cast<uint32_t>(value) >> 23 & 0xff; }

// Division, as the guide splits it: v_div_scale brings operands into a range where Newton's iteration is exact,
// v_div_fmas scales back where VCC says so, v_div_fixup puts in the special cases.
void divide_scale(Wave& wave, const Instruction& in) {
  alignas(64) float value[kLanes], denominator[kLanes], numerator[kLanes], result[kLanes];
  read(wave, in, 2, 0, value);
  read(wave, in, 3, 1, denominator);
  read(wave, in, 4, 2, numerator);
  uint64_t scaled = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    float s = value[lane], d = denominator[lane], n = numerator[lane];
    bool is_denominator = std::bit_cast<uint32_t>(s) == std::bit_cast<uint32_t>(d);
    bool is_numerator = std::bit_cast<uint32_t>(s) == std::bit_cast<uint32_t>(n);
    bool flag = false;
    int scale = 0;
    double inverse = 1 / static_cast<double>(d), quotient = n * inverse;
    if (d == 0 || n == 0) {
      result[lane] = std::numeric_limits<float>::quiet_NaN();
      continue;
    }
    if (exponent_field(n) - exponent_field(d) >= 96)
      flag = true, scale = is_denominator ? 64 : 0;
    else if (subnormal(d))
      scale = 64;
    else if (subnormal(inverse) && subnormal(quotient))
      flag = true, scale = is_denominator ? 64 : 0;
    else if (subnormal(inverse))
      scale = -64;
    else if (subnormal(quotient))
      flag = true, scale = is_numerator ? 64 : 0;
    else if (exponent_field(n) <= 23)
      scale = 64;
    result[lane] = std::ldexp(s, scale);
    if (flag) scaled |= 1ull << lane;
  }
  write(wave, in, 0, result);
  write_scalar64(wave, in.operand[1], scaled & wave.exec());
}

void divide_fmas(Wave& wave, const Instruction& in) {
  alignas(64) float a[kLanes], b[kLanes], c[kLanes], result[kLanes];
  read(wave, in, 1, 0, a);
  read(wave, in, 2, 1, b);
  read(wave, in, 3, 2, c);
  check_scalar(wave, kVcc, 2);
  for (int lane = 0; lane < kLanes; ++lane) {
    result[lane] = std::fma(a[lane], b[lane], c[lane]);
    if (active(wave.scalar64(kVcc), lane))
      result[lane] = std::ldexp(result[lane], exponent_field(c[lane]) > 127 ? 64 : -64);
  }
  write(wave, in, 0, result);
}

float divide_fixup(float quotient, float denominator, float numerator) {
  bool negative = std::signbit(denominator) != std::signbit(numerator);
  if (std::isnan(numerator)) return numerator;
  if (std::isnan(denominator)) return denominator;
  bool undefined = (numerator == 0 && denominator == 0) || (std::isinf(numerator) && std::isinf(denominator));
  if (undefined) return std::numeric_limits<float>::quiet_NaN();
  float magnitude = std::fabs(quotient);
  if (denominator == 0 || std::isinf(numerator))
    magnitude = std::numeric_limits<float>::infinity();
  else if (numerator == 0 || std::isinf(denominator))
    magnitude = 0;
  else if (exponent_field(numerator) - exponent_field(denominator) < -150)
    magnitude = 0;
  else if (std::isnan(quotient))
    magnitude = std::numeric_limits<float>::infinity();
  return negative ? -magnitude : magnitude;
}

void define_floats(Registry& registry) {
  float_basics<float>(registry, "f32");
  float_basics<Half>(registry, "f16");
  vector(registry, "v_maximum3_f32", [](float a, float b, float c) { return maximum_or_nan(maximum_or_nan(a, b), c); });
  vector(registry, "v_minimum3_f32",
         [](float a, float b, float c) { return -maximum_or_nan(maximum_or_nan(-a, -b), -c); });
  vector(registry, "v_fma_f32", [](float a, float b, float c) { return std::fma(a, b, c); });
  accumulating(registry, "v_fmac_f32", [](float a, float b, float d) { return std::fma(a, b, d); });
  vector(registry, "v_fmamk_f32", [](float a, float k, float b) { return std::fma(a, k, b); });
  vector(registry, "v_fmaak_f32", [](float a, float b, float k) { return std::fma(a, b, k); });
  vector(registry, "v_fma_f16", [](Half a, Half b, Half c) { return fma16(a, b, c); });
  accumulating(registry, "v_fmac_f16", [](Half a, Half b, Half d) { return fma16(a, b, d); });
  vector(registry, "v_mul_legacy_f32", [](float a, float b) { return a == 0 || b == 0 ? 0.0f : a * b; });
  registry["v_div_scale_f32"] = divide_scale;
  registry["v_div_fmas_f32"] = divide_fmas;
  vector(registry, "v_div_fixup_f32", [](float q, float b, float a) { return divide_fixup(q, b, a); });

  // Transcendental instructions are within 1 ulp in hardware; here they are rounded correctly.
  vector(registry, "v_exp_f32",
         [](float a) { return flush(static_cast<float>(std::exp2(static_cast<double>(flush(a))))); });
  vector(registry, "v_log_f32", [](float a) { return static_cast<float>(std::log2(static_cast<double>(flush(a)))); });
  vector(registry, "v_rcp_f32", [](float a) { return static_cast<float>(1 / static_cast<double>(a)); });
  vector(registry, "v_rcp_iflag_f32", [](float a) { return static_cast<float>(1 / static_cast<double>(a)); });
  vector(registry, "v_rsq_f32",
         [](float a) { return static_cast<float>(1 / std::sqrt(static_cast<double>(flush(a)))); });
  vector(registry, "v_sqrt_f32", [](float a) { return static_cast<float>(std::sqrt(static_cast<double>(flush(a)))); });
  vector(registry, "v_exp_f16", [](Half a) { return static_cast<Half>(std::exp2(static_cast<double>(a))); });
  vector(registry, "v_log_f16", [](Half a) { return static_cast<Half>(std::log2(static_cast<double>(a))); });
  vector(registry, "v_rcp_f16", [](Half a) { return static_cast<Half>(1 / static_cast<double>(a)); });
  vector(registry, "v_rndne_f32", [](float a) { return std::nearbyint(a); });
  vector(registry, "v_floor_f32", [](float a) { return std::floor(a); });
  vector(registry, "v_ceil_f32", [](float a) { return std::ceil(a); });
  vector(registry, "v_trunc_f32", [](float a) { return std::trunc(a); });
  vector(registry, "v_fract_f32", [](float a) { return std::min(a - std::floor(a), 0x1.fffffep-1f); });
  vector(registry, "v_ldexp_f32", [](float a, int32_t b) { return std::ldexp(a, b); });
  vector(registry, "v_frexp_mant_f32", [](float a) {
    int exponent;
    return std::isfinite(a) ? std::frexp(a, &exponent) : a;
  });
  vector(registry, "v_frexp_exp_i32_f32", [](float a) {
    int exponent = 0;
    if (std::isfinite(a)) std::frexp(a, &exponent);
    return static_cast<int32_t>(exponent);
  });

  vector(registry, "v_add_f64", [](double a, double b) { return a + b; });
  vector(registry, "v_mul_f64", [](double a, double b) { return a * b; });
  vector(registry, "v_fma_f64", [](double a, double b, double c) { return std::fma(a, b, c); });
}

void define_conversions(Registry& registry) {
  vector(registry, "v_cvt_f32_i32", [](int32_t a) { return static_cast<float>(a); });
  vector(registry, "v_cvt_f32_u32", [](uint32_t a) { return static_cast<float>(a); });
  vector(registry, "v_cvt_i32_f32", [](float a) { return to_integer<int32_t>(a); });
  vector(registry, "v_cvt_u32_f32", [](float a) { return to_integer<uint32_t>(a); });
  vector(registry, "v_cvt_f32_f16", [](Half a) { return static_cast<float>(a); });
  vector(registry, "v_cvt_f16_f32", [](float a) { return static_cast<Half>(a); });
  vector(registry, "v_cvt_f64_f32", [](float a) { return static_cast<double>(a); });
  vector(registry, "v_cvt_f32_f64", [](double a) { return static_cast<float>(a); });
  vector(registry, "v_cvt_f64_i32", [](int32_t a) { return static_cast<double>(a); });
  vector(registry, "v_cvt_f64_u32", [](uint32_t a) { return static_cast<double>(a); });
  vector(registry, "v_cvt_f32_ubyte0", [](uint32_t a) { return static_cast<float>(a & 0xff); });
  vector(registry, "v_cvt_f32_ubyte1", [](uint32_t a) { return static_cast<float>(a >> 8 & 0xff); });
  vector(registry, "v_cvt_f32_ubyte2", [](uint32_t a) { return static_cast<float>(a >> 16 & 0xff); });
  vector(registry, "v_cvt_f32_ubyte3", [](uint32_t a) { return static_cast<float>(a >> 24); });
  vector(registry, "v_cvt_f32_bf16", [](uint16_t a) { return bf16_to_float(a); });
  narrowing(registry, "v_cvt_pk_bf16_f32",
            [](float a, float b) { return float_to_bf16(a) | static_cast<uint32_t>(float_to_bf16(b)) << 16; });
  narrowing(registry, "v_cvt_pk_f16_f32", [](float a, float b) {
    return std::bit_cast<uint16_t>(static_cast<Half>(a)) |
           static_cast<uint32_t>(std::bit_cast<uint16_t>(static_cast<Half>(b))) << 16;
  });
  narrowing(registry, "v_cvt_pkrtz_f16_f32", [](float a, float b) {
    return float_to_half_toward_zero(a) | static_cast<uint32_t>(float_to_half_toward_zero(b)) << 16;
  });
  vector(registry, "v_pack_b32_f16", [](uint16_t a, uint16_t b) { return a | static_cast<uint32_t>(b) << 16; });
}

// FP8: one byte of the source, chosen by SDWA or op_sel.
template <bool kE5M2>
void from_fp8(Wave& wave, const Instruction& in) {
  alignas(64) uint32_t bits[kLanes];
  alignas(64) float values[kLanes];
  read(wave, in, 1, 0, bits);
  const auto& table = fp8_values(wave.group->architecture, kE5M2);
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = table[bits[lane] & 0xff];
  Instruction plain = in;
  plain.sdwa = 0;
  write(wave, plain, 0, values);
}

template <bool kE5M2>
void from_fp8_pair(Wave& wave, const Instruction& in) {
  alignas(64) uint32_t bits[kLanes];
  alignas(64) float low[kLanes], high[kLanes];
  read(wave, in, 1, 0, bits);
  const auto& table = fp8_values(wave.group->architecture, kE5M2);
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t pair = in.op_sel[0] ? bits[lane] >> 16 : bits[lane];
    low[lane] = table[pair & 0xff];
    high[lane] = table[pair >> 8 & 0xff];
  }
  write_raw(wave, in.operand[0].first, reinterpret_cast<uint32_t*>(low), wave.exec());
  write_raw(wave, in.operand[0].first + 1, reinterpret_cast<uint32_t*>(high), wave.exec());
}

// To two elements of 16 bits, times the power of two that the second source has.
template <bool kE5M2, class ToBits>
void from_fp8_pair_scaled(Wave& wave, const Instruction& in, ToBits to_bits) {
  alignas(64) uint32_t bits[kLanes], result[kLanes];
  alignas(64) float scale[kLanes];
  read(wave, in, 1, 0, bits);
  read(wave, in, 2, 1, scale);
  const auto& table = fp8_values(wave.group->architecture, kE5M2);
  for (int lane = 0; lane < kLanes; ++lane) {
    int exponent;
    if (std::frexp(scale[lane], &exponent) != 0.5f) throw Fault("a scale that is no power of two is not modelled");
    uint32_t pair = in.op_sel[0] ? bits[lane] >> 16 : bits[lane];
    result[lane] = to_bits(table[pair & 0xff] * scale[lane]) | to_bits(table[pair >> 8 & 0xff] * scale[lane]) << 16;
  }
  write_raw(wave, in.operand[0].first, result, wave.exec());
}

template <bool kE5M2>
void define_scaled_fp8(Registry& registry, const std::string& format) {
  registry["v_cvt_scalef32_pk_bf16_" + format] = [](Wave& wave, const Instruction& in) {
    from_fp8_pair_scaled<kE5M2>(wave, in, [](float x) { return uint32_t{float_to_bf16(x)}; });
  };
  registry["v_cvt_scalef32_pk_f16_" + format] = [](Wave& wave, const Instruction& in) {
    from_fp8_pair_scaled<kE5M2>(wave, in,
                                [](float x) { return uint32_t{std::bit_cast<uint16_t>(static_cast<Half>(x))}; });
  };
}

template <bool kE5M2>
void to_fp8_pair(Wave& wave, const Instruction& in) {
  alignas(64) float a[kLanes], b[kLanes];
  alignas(64) uint32_t result[kLanes];
  read(wave, in, 1, 0, a);
  read(wave, in, 2, 1, b);
  const Float8& format = fp8_format(wave.group->architecture, kE5M2);
  bool clamp = wave.mode & kModeFp16Overflow;
  int shift = in.op_sel[2] || in.op_sel[3] ? 16 : 0;
  int r = in.operand[0].first;
  check_vector(wave, r, 1);
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t pair = format.encode(a[lane], clamp) | format.encode(b[lane], clamp) << 8;
    result[lane] = (wave.v[r][lane] & ~(0xffffu << shift)) | pair << shift;
  }
  write_raw(wave, r, result, wave.exec());
}

void define_fp8(Registry& registry) {
  registry["v_cvt_f32_fp8"] = from_fp8<false>;
  registry["v_cvt_f32_bf8"] = from_fp8<true>;
  registry["v_cvt_pk_f32_fp8"] = from_fp8_pair<false>;
  registry["v_cvt_pk_f32_bf8"] = from_fp8_pair<true>;
  registry["v_cvt_pk_fp8_f32"] = to_fp8_pair<false>;
  registry["v_cvt_pk_bf8_f32"] = to_fp8_pair<true>;
  define_scaled_fp8<false>(registry, "fp8");
  define_scaled_fp8<true>(registry, "bf8");
}

template <class T>
void integer_order(Registry& registry, const std::string& type) {
  vector(registry, "v_max_" + type, [](T a, T b) { return std::max(a, b); });
  vector(registry, "v_min_" + type, [](T a, T b) { return std::min(a, b); });
  vector(registry, "v_max3_" + type, [](T a, T b, T c) { return std::max(std::max(a, b), c); });
  vector(registry, "v_min3_" + type, [](T a, T b, T c) { return std::min(std::min(a, b), c); });
  vector(registry, "v_med3_" + type, [](T a, T b, T c) { return median(a, b, c); });
}

void define_integers(Registry& registry) {
  integer_order<int32_t>(registry, "i32");
  integer_order<uint32_t>(registry, "u32");
  integer_order<int16_t>(registry, "i16");
  integer_order<uint16_t>(registry, "u16");
  for (const char* name : {"v_mov_b32", "v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32"})
    vector(registry, name, [](uint32_t a) { return a; });
  vector(registry, "v_mov_b64", [](uint64_t a) { return a; });
  vector(registry, "v_not_b32", [](uint32_t a) { return ~a; });
  vector(registry, "v_bfrev_b32", [](uint32_t a) { return __builtin_bitreverse32(a); });
  vector(registry, "v_ffbh_u32", [](uint32_t a) { return a ? std::countl_zero(a) : -1; });
  vector(registry, "v_ffbl_b32", [](uint32_t a) { return a ? std::countr_zero(a) : -1; });
  vector(registry, "v_bcnt_u32_b32",
         [](uint32_t a, uint32_t b) { return static_cast<uint32_t>(std::popcount(a)) + b; });

  vector(registry, "v_add_u32", [](uint32_t a, uint32_t b) { return a + b; });
  vector(registry, "v_sub_u32", [](uint32_t a, uint32_t b) { return a - b; });
  vector(registry, "v_subrev_u32", [](uint32_t a, uint32_t b) { return b - a; });
  vector(registry, "v_add_i32", [](uint32_t a, uint32_t b) { return a + b; });
  vector(registry, "v_sub_i32", [](uint32_t a, uint32_t b) { return a - b; });
  vector(registry, "v_add_u16", [](uint16_t a, uint16_t b) { return static_cast<uint16_t>(a + b); });
  vector(registry, "v_sub_u16", [](uint16_t a, uint16_t b) { return static_cast<uint16_t>(a - b); });
  vector(registry, "v_mul_lo_u16",
         [](uint16_t a, uint16_t b) { return static_cast<uint16_t>(static_cast<uint32_t>(a) * b); });
  vector(registry, "v_mad_u16",
         [](uint16_t a, uint16_t b, uint16_t c) { return static_cast<uint16_t>(static_cast<uint32_t>(a) * b + c); });
  vector(registry, "v_add3_u32", [](uint32_t a, uint32_t b, uint32_t c) { return a + b + c; });
  vector(registry, "v_lshl_add_u32", [](uint32_t a, uint32_t b, uint32_t c) { return (a << (b & 31)) + c; });
  vector(registry, "v_add_lshl_u32", [](uint32_t a, uint32_t b, uint32_t c) { return (a + b) << (c & 31); });
  vector(registry, "v_xad_u32", [](uint32_t a, uint32_t b, uint32_t c) { return (a ^ b) + c; });
  vector(registry, "v_lshl_add_u64", [](uint64_t a, uint32_t b, uint64_t c) { return (a << (b & 7)) + c; });
  vector(registry, "v_mul_lo_u32", [](uint32_t a, uint32_t b) { return a * b; });
  vector(registry, "v_mul_hi_u32", [](uint32_t a, uint32_t b) { return high32(static_cast<uint64_t>(a) * b); });
  vector(registry, "v_mul_hi_i32", [](int32_t a, int32_t b) { return high32(static_cast<int64_t>(a) * b); });
  vector(registry, "v_mul_u32_u24", [](uint32_t a, uint32_t b) { return low24(a) * low24(b); });
  vector(registry, "v_mul_hi_u32_u24",
         [](uint32_t a, uint32_t b) { return high32(static_cast<uint64_t>(low24(a)) * low24(b)); });
  vector(registry, "v_mul_i32_i24",
         [](int32_t a, int32_t b) { return static_cast<uint32_t>(static_cast<int64_t>(signed24(a)) * signed24(b)); });
  vector(registry, "v_mul_hi_i32_i24",
         [](int32_t a, int32_t b) { return high32(static_cast<int64_t>(signed24(a)) * signed24(b)); });
  vector(registry, "v_mad_u32_u24", [](uint32_t a, uint32_t b, uint32_t c) { return low24(a) * low24(b) + c; });
  vector(registry, "v_mad_i32_i24", [](int32_t a, int32_t b, uint32_t c) {
    return static_cast<uint32_t>(static_cast<int64_t>(signed24(a)) * signed24(b)) + c;
  });
}

// Bit 4a + 2b + c of the immediate is the result of bits a, b, c.
template <class T>
void truth_table(Wave& wave, const Instruction& in) {
  alignas(64) T a[kLanes], b[kLanes], c[kLanes], result[kLanes] = {};
  read(wave, in, 1, 0, a);
  read(wave, in, 2, 1, b);
  read(wave, in, 3, 2, c);
  for (int row = 0; row < 8; ++row) {
    if (!(in.immediate[0] >> row & 1)) continue;
    for (int lane = 0; lane < kLanes; ++lane)
      result[lane] |= (row & 4 ? a[lane] : ~a[lane]) & (row & 2 ? b[lane] : ~b[lane]) & (row & 1 ? c[lane] : ~c[lane]);
  }
  write(wave, in, 0, result, 3);
}

void define_bits(Registry& registry) {
  vector(registry, "v_and_b32", [](uint32_t a, uint32_t b) { return a & b; });
  vector(registry, "v_or_b32", [](uint32_t a, uint32_t b) { return a | b; });
  vector(registry, "v_xor_b32", [](uint32_t a, uint32_t b) { return a ^ b; });
  vector(registry, "v_xnor_b32", [](uint32_t a, uint32_t b) { return ~(a ^ b); });
  vector(registry, "v_and_or_b32", [](uint32_t a, uint32_t b, uint32_t c) { return (a & b) | c; });
  vector(registry, "v_or3_b32", [](uint32_t a, uint32_t b, uint32_t c) { return a | b | c; });
  vector(registry, "v_lshl_or_b32", [](uint32_t a, uint32_t b, uint32_t c) { return (a << (b & 31)) | c; });
  vector(registry, "v_lshlrev_b32", [](uint32_t a, uint32_t b) { return b << (a & 31); });
  vector(registry, "v_lshrrev_b32", [](uint32_t a, uint32_t b) { return b >> (a & 31); });
  vector(registry, "v_ashrrev_i32", [](uint32_t a, int32_t b) { return b >> (a & 31); });
  vector(registry, "v_lshlrev_b64", [](uint32_t a, uint64_t b) { return b << (a & 63); });
  vector(registry, "v_lshrrev_b64", [](uint32_t a, uint64_t b) { return b >> (a & 63); });
  vector(registry, "v_ashrrev_i64", [](uint32_t a, int64_t b) { return b >> (a & 63); });
  vector(registry, "v_lshlrev_b16", [](uint16_t a, uint16_t b) { return static_cast<uint16_t>(b << (a & 15)); });
  vector(registry, "v_lshrrev_b16", [](uint16_t a, uint16_t b) { return static_cast<uint16_t>(b >> (a & 15)); });
  vector(registry, "v_ashrrev_i16", [](uint16_t a, int16_t b) { return static_cast<int16_t>(b >> (a & 15)); });
  vector(registry, "v_bfi_b32", [](uint32_t mask, uint32_t a, uint32_t b) { return (mask & a) | (~mask & b); });
  vector(registry, "v_bfm_b32", [](uint32_t a, uint32_t b) { return ((1u << (a & 31)) - 1) << (b & 31); });
  vector(registry, "v_bfe_u32",
         [](uint32_t a, uint32_t first, uint32_t width) { return a >> (first & 31) & ((1u << (width & 31)) - 1); });
  vector(registry, "v_bfe_i32", [](int32_t a, uint32_t first, uint32_t width) {
    width &= 31;
    if (width == 0) return 0;
    uint32_t field = static_cast<uint32_t>(a >> (first & 31)) << (32 - width);
    return static_cast<int32_t>(field) >> (32 - width);
  });
  vector(registry, "v_alignbit_b32", [](uint32_t a, uint32_t b, uint32_t c) {
    return static_cast<uint32_t>((static_cast<uint64_t>(a) << 32 | b) >> (c & 31));
  });
  vector(registry, "v_alignbyte_b32", [](uint32_t a, uint32_t b, uint32_t c) {
    return static_cast<uint32_t>((static_cast<uint64_t>(a) << 32 | b) >> 8 * (c & 3));
  });
  vector(registry, "v_perm_b32", [](uint32_t a, uint32_t b, uint32_t c) { return permute_bytes(a, b, c); });
  registry["v_bitop3_b32"] = truth_table<uint32_t>;
  registry["v_bitop3_b16"] = truth_table<uint16_t>;
}

// ---- Results and sources with one bit a lane

// v_cmp writes a mask (inactive lanes 0), v_cmpx EXEC as well. Without a written result it goes to VCC.
template <class F, class R, class... A>
struct Compare {
  template <bool kExecToo>
  static void run(Wave& wave, const Instruction& in) {
    apply<kExecToo>(wave, in, std::make_index_sequence<sizeof...(A)>{});
  }
  template <bool kExecToo, size_t... I>
  static void apply(Wave& wave, const Instruction& in, std::index_sequence<I...>) {
    if (in.dpp) throw Fault("DPP of a compare is not modelled");
    std::tuple<std::array<A, kLanes>...> sources;
    (read(wave, in, I + 1, I, std::get<I>(sources).data()), ...);
    uint64_t mask = 0;
    for (int lane = 0; lane < kLanes; ++lane) mask |= static_cast<uint64_t>(F{}(std::get<I>(sources)[lane]...)) << lane;
    mask &= wave.exec();
    write_scalar64(wave, in.operand[0], mask);
    if (kExecToo) wave.set_scalar64(kExec, mask);
  }
};

template <class F>
void compare(Registry& registry, const std::string& condition, F) {
  using Operation = typename Signature<F>::template Apply<Compare>;
  registry["v_cmp_" + condition] = &Operation::template run<false>;
  registry["v_cmpx_" + condition] = &Operation::template run<true>;
}

template <class T>
void compare_all(Registry& registry, const std::string& type) {
  compare(registry, "lt_" + type, [](T a, T b) { return a < b; });
  compare(registry, "le_" + type, [](T a, T b) { return a <= b; });
  compare(registry, "gt_" + type, [](T a, T b) { return a > b; });
  compare(registry, "ge_" + type, [](T a, T b) { return a >= b; });
  compare(registry, "eq_" + type, [](T a, T b) { return a == b; });
  if constexpr (std::is_integral_v<T>) {
    compare(registry, "ne_" + type, [](T a, T b) { return a != b; });
  } else {
    compare(registry, "lg_" + type, [](T a, T b) { return a < b || a > b; });
    compare(registry, "neq_" + type, [](T a, T b) { return !(a == b); });
    compare(registry, "nlt_" + type, [](T a, T b) { return !(a < b); });
    compare(registry, "nle_" + type, [](T a, T b) { return !(a <= b); });
    compare(registry, "ngt_" + type, [](T a, T b) { return !(a > b); });
    compare(registry, "nge_" + type, [](T a, T b) { return !(a >= b); });
    compare(registry, "nlg_" + type, [](T a, T b) { return !(a < b || a > b); });
    compare(registry, "o_" + type, [](T a, T b) { return a == a && b == b; });
    compare(registry, "u_" + type, [](T a, T b) { return a != a || b != b; });
  }
}

bool is_class(float value, uint32_t classes) {
  bool negative = std::signbit(value);
  int bit = 0;
  switch (std::fpclassify(value)) {
    case FP_NAN: bit = std::bit_cast<uint32_t>(value) >> 22 & 1 ? 1 : 0; break;
    case FP_INFINITE: bit = negative ? 2 : 9; break;
    case FP_NORMAL: bit = negative ? 3 : 8; break;
    case FP_SUBNORMAL: bit = negative ? 4 : 7; break;
    default: bit = negative ? 5 : 6; break;
  }
  return classes >> bit & 1;
}

void select(Wave& wave, const Instruction& in) {
  alignas(64) uint32_t a[kLanes], b[kLanes], result[kLanes];
  read(wave, in, 1, 0, a);
  read(wave, in, 2, 1, b);
  uint64_t mask;
  if (in.operands > 3) {
    mask = read_scalar64(wave, in.operand[3]);
  } else {
    check_scalar(wave, kVcc, 2);
    mask = wave.scalar64(kVcc);
  }
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = active(mask, lane) ? b[lane] : a[lane];
  write(wave, in, 0, result);
}

// A lambda (a, b, carry) -> 64 bits, whose bit 32 is the carry or the borrow.
template <class F>
void carrying(Registry& registry, const char* name, F) {
  registry[name] = [](Wave& wave, const Instruction& in) {
    alignas(64) uint32_t a[kLanes], b[kLanes], result[kLanes];
    read(wave, in, 2, 0, a);
    read(wave, in, 3, 1, b);
    uint64_t carries = in.operands > 4 ? read_scalar64(wave, in.operand[4]) : 0, out = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      uint64_t value = F{}(a[lane], b[lane], active(carries, lane));
      result[lane] = static_cast<uint32_t>(value);
      out |= (value >> 32 & 1) << lane;
    }
    if (in.clamp) throw Fault("clamping an integer is not modelled");
    write(wave, in, 0, result);
    write_scalar64(wave, in.operand[1], out & wave.exec());
  };
}

template <class T>
void multiply_add_64(Wave& wave, const Instruction& in) {
  alignas(64) T a[kLanes], b[kLanes];
  alignas(64) uint64_t c[kLanes], result[kLanes];
  read(wave, in, 2, 0, a);
  read(wave, in, 3, 1, b);
  read(wave, in, 4, 2, c);
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  uint64_t carries = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    uint64_t product = static_cast<uint64_t>(static_cast<Wide>(a[lane]) * static_cast<Wide>(b[lane]));
    Wide sum;
    if (__builtin_add_overflow(static_cast<Wide>(product), static_cast<Wide>(c[lane]), &sum)) carries |= 1ull << lane;
    result[lane] = static_cast<uint64_t>(sum);
  }
  write(wave, in, 0, result);
  write_scalar64(wave, in.operand[1], carries & wave.exec());
}

void define_masks(Registry& registry) {
  compare_all<float>(registry, "f32");
  compare_all<Half>(registry, "f16");
  compare_all<double>(registry, "f64");
  compare_all<int32_t>(registry, "i32");
  compare_all<uint32_t>(registry, "u32");
  compare_all<int16_t>(registry, "i16");
  compare_all<uint16_t>(registry, "u16");
  compare_all<int64_t>(registry, "i64");
  compare_all<uint64_t>(registry, "u64");
  compare(registry, "class_f32", [](float a, uint32_t b) { return is_class(a, b); });
  registry["v_cndmask_b32"] = select;
  carrying(registry, "v_add_co_u32", [](uint64_t a, uint64_t b, bool) { return a + b; });
  carrying(registry, "v_sub_co_u32", [](uint64_t a, uint64_t b, bool) { return a - b; });
  carrying(registry, "v_subrev_co_u32", [](uint64_t a, uint64_t b, bool) { return b - a; });
  carrying(registry, "v_addc_co_u32", [](uint64_t a, uint64_t b, bool c) { return a + b + c; });
  carrying(registry, "v_subb_co_u32", [](uint64_t a, uint64_t b, bool c) { return a - b - c; });
  carrying(registry, "v_subbrev_co_u32", [](uint64_t a, uint64_t b, bool c) { return b - a - c; });
  registry["v_mad_u64_u32"] = multiply_add_64<uint32_t>;
  registry["v_mad_i64_i32"] = multiply_add_64<int32_t>;
}

// ---- Moves between lanes

void first_lane(Wave& wave, const Instruction& in) {
  alignas(64) uint32_t values[kLanes];
  read_raw(wave, in.operand[1], 0, values);
  write_scalar(wave, in.operand[0], values[wave.exec() ? std::countr_zero(wave.exec()) : 0]);
}

void read_lane(Wave& wave, const Instruction& in) {
  alignas(64) uint32_t values[kLanes];
  read_raw(wave, in.operand[1], 0, values);
  write_scalar(wave, in.operand[0], values[read_scalar(wave, in.operand[2]) % kLanes]);
}

void write_lane(Wave& wave, const Instruction& in) {
  check_vector(wave, in.operand[0].first, 1);
  wave.v[in.operand[0].first][read_scalar(wave, in.operand[2]) % kLanes] = read_scalar(wave, in.operand[1]);
}

// Odd groups of kGroup lanes of operand 0 change places with the even groups of operand 1, whatever EXEC says.
template <int kGroup>
void swap_lanes(Wave& wave, const Instruction& in) {
  int a = in.operand[0].first, b = in.operand[1].first;
  check_vector(wave, a, 1);
  check_vector(wave, b, 1);
  if (wave.exec() != ~0ull) throw Fault("a swap of lanes with inactive lanes is not modelled");
  for (int lane = 0; lane < kLanes; ++lane)
    if (lane / kGroup % 2 == 0) std::swap(wave.v[a][lane + kGroup], wave.v[b][lane]);
}

void swap_registers(Wave& wave, const Instruction& in) {
  alignas(64) uint32_t a[kLanes], b[kLanes];
  read_raw(wave, in.operand[0], 0, a);
  read_raw(wave, in.operand[1], 0, b);
  write_raw(wave, in.operand[0].first, b, wave.exec());
  write_raw(wave, in.operand[1].first, a, wave.exec());
}

// Bits of a mask below the lane, in its low or its high half, added up.
template <bool kHigh>
void count_below(Wave& wave, const Instruction& in) {
  alignas(64) uint32_t mask[kLanes], add[kLanes], result[kLanes];
  read(wave, in, 1, 0, mask);
  read(wave, in, 2, 1, add);
  for (int lane = 0; lane < kLanes; ++lane) {
    uint64_t below = (1ull << lane) - 1;
    result[lane] = std::popcount(mask[lane] & static_cast<uint32_t>(kHigh ? below >> 32 : below)) + add[lane];
  }
  write(wave, in, 0, result);
}

void define_lanes(Registry& registry) {
  registry["v_nop"] = [](Wave&, const Instruction&) {};
  registry["v_readfirstlane_b32"] = first_lane;
  registry["v_readlane_b32"] = read_lane;
  registry["v_writelane_b32"] = write_lane;
  registry["v_permlane32_swap_b32"] = swap_lanes<32>;
  registry["v_permlane16_swap_b32"] = swap_lanes<16>;
  registry["v_swap_b32"] = swap_registers;
  registry["v_mbcnt_lo_u32_b32"] = count_below<false>;
  registry["v_mbcnt_hi_u32_b32"] = count_below<true>;
}

}  // namespace

void define_vector(Registry& registry) {
  define_floats(registry);
  define_conversions(registry);
  define_fp8(registry);
  define_integers(registry);
  define_bits(registry);
  define_masks(registry);
  define_lanes(registry);
}

}  // namespace gfx9
