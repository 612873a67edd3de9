// Packed instructions: two values of 32 or 16 bits in each lane, chosen by op_sel and op_sel_hi, and dot products of
// two.
#include <cmath>

#include "floats.h"
#include "vector.h"

namespace gfx9 {
namespace {

// Values of one of the two halves of source k (operand k + 1). A 32-bit pair lies in two registers; a constant or a
// pair of halves in one.
template <class T>
void read_half(const Wave& wave, const Instruction& in, int k, bool upper, T* out) {
  const Operand& operand = in.operand[k + 1];
  bool second = upper ? in.op_sel_hi[k] : in.op_sel[k];
  alignas(64) uint32_t bits[kLanes];
  if constexpr (sizeof(T) == 4) {
    if (operand.kind == Kind::constant) {
      if (second) throw Fault("the upper half of a constant pair of 32 bits is not modelled");
      std::fill_n(bits, kLanes, operand.bits32);
    } else {
      read_raw(wave, operand, second, bits);
    }
  } else {
    if (operand.kind == Kind::constant)  // 16 bits of a float and zeros above, or an integer with its sign
      std::fill_n(bits, kLanes, operand.bits16 == (operand.bits32 & 0xffff) ? operand.bits32 : operand.bits16);
    else
      read_raw(wave, operand, 0, bits);
    if (second)
      for (uint32_t& value : bits) value >>= 16;
  }
  bool negate = upper ? in.neg_hi[k] : in.neg_lo[k];
  for (int lane = 0; lane < kLanes; ++lane) {
    if constexpr (sizeof(T) == 4)
      out[lane] = std::bit_cast<T>(negate ? bits[lane] ^ 0x80000000 : bits[lane]);
    else
      out[lane] = std::bit_cast<T>(static_cast<uint16_t>(negate ? bits[lane] ^ 0x8000 : bits[lane]));
  }
}

template <class F, class R, class... A>
struct Packed {
  static void run(Wave& wave, const Instruction& in) { apply(wave, in, std::make_index_sequence<sizeof...(A)>{}); }

  template <size_t... I>
  static void apply(Wave& wave, const Instruction& in, std::index_sequence<I...>) {
    alignas(64) R result[2][kLanes];
    for (int upper = 0; upper < 2; ++upper) {
      std::tuple<std::array<A, kLanes>...> sources;
      (read_half(wave, in, I, upper, std::get<I>(sources).data()), ...);
      for (int lane = 0; lane < kLanes; ++lane) result[upper][lane] = F{}(std::get<I>(sources)[lane]...);
      if constexpr (std::is_same_v<R, Half>) refuse_overflow_mode(wave);
      if constexpr (!std::is_integral_v<R>) modify(in, result[upper]);
    }
    if constexpr (std::is_integral_v<R>)
      if (in.clamp) throw Fault("clamping an integer is not modelled");
    int r = in.operand[0].first;
    if constexpr (sizeof(R) == 4) {
      write_raw(wave, r, reinterpret_cast<uint32_t*>(result[0]), wave.exec());
      write_raw(wave, r + 1, reinterpret_cast<uint32_t*>(result[1]), wave.exec());
    } else {
      alignas(64) uint32_t both[kLanes];
      for (int lane = 0; lane < kLanes; ++lane)
        both[lane] = std::bit_cast<uint16_t>(result[0][lane]) |
                     static_cast<uint32_t>(std::bit_cast<uint16_t>(result[1][lane])) << 16;
      write_raw(wave, r, both, wave.exec());
    }
  }
};

template <class F>
void packed(Registry& registry, const char* name, F) {
  registry[name] = Signature<F>::template Apply<Packed>::run;
}

void move_pair(Wave& wave, const Instruction& in) {
  alignas(64) uint32_t low[kLanes], high[kLanes];
  auto half = [&](int k, uint32_t* out) {
    const Operand& operand = in.operand[k + 1];
    read_raw(wave, operand, operand.kind == Kind::constant ? 0 : in.op_sel[k], out);
  };
  half(0, low);
  half(1, high);
  write_raw(wave, in.operand[0].first, low, wave.exec());
  write_raw(wave, in.operand[0].first + 1, high, wave.exec());
}

// a0 * b0 + a1 * b1 + c. Exact sums, rounded once: hardware may round in between.
template <bool kBf16, bool kAccumulates>
void dot2(Wave& wave, const Instruction& in) {
  alignas(64) uint16_t a[2][kLanes], b[2][kLanes];
  alignas(64) float c[kLanes], result[kLanes];
  for (int upper = 0; upper < 2; ++upper) {
    read_half(wave, in, 0, upper, a[upper]);
    read_half(wave, in, 1, upper, b[upper]);
  }
  read_raw(wave, in.operand[kAccumulates ? 0 : 3], 0, reinterpret_cast<uint32_t*>(c));
  auto value = [](uint16_t bits) -> double {
    return kBf16 ? bf16_to_float(bits) : static_cast<float>(std::bit_cast<Half>(bits));
  };
  for (int lane = 0; lane < kLanes; ++lane)
    result[lane] =
        static_cast<float>(value(a[0][lane]) * value(b[0][lane]) + value(a[1][lane]) * value(b[1][lane]) + c[lane]);
  modify(in, result);
  write_raw(wave, in.operand[0].first, reinterpret_cast<uint32_t*>(result), wave.exec());
}

// Source k of a mixed instruction: fp32, or, with op_sel_hi, the half that op_sel chooses.
void read_mixed(const Wave& wave, const Instruction& in, int k, float* out) {
  const Operand& operand = in.operand[k + 1];
  alignas(64) uint32_t bits[kLanes];
  bool half = in.op_sel_hi[k];
  if (half && operand.kind == Kind::constant)
    std::fill_n(bits, kLanes, operand.bits16);
  else
    read_raw(wave, operand, 0, bits);
  for (int lane = 0; lane < kLanes; ++lane) {
    float value = half ? static_cast<float>(std::bit_cast<Half>(static_cast<uint16_t>(bits[lane] >> 16 * in.op_sel[k])))
                       : std::bit_cast<float>(bits[lane]);
    if (operand.absolute) value = std::fabs(value);
    out[lane] = operand.negate ? -value : value;
  }
}

// The sum is rounded to fp32, and from there to the half of the result that is written; the other half stays.
enum class MixResult { whole, low, high };

template <MixResult kResult>
void mix(Wave& wave, const Instruction& in) {
  if (kResult != MixResult::whole) refuse_overflow_mode(wave);
  alignas(64) float a[kLanes], b[kLanes], c[kLanes];
  alignas(64) uint32_t bits[kLanes];
  read_mixed(wave, in, 0, a);
  read_mixed(wave, in, 1, b);
  read_mixed(wave, in, 2, c);
  for (int lane = 0; lane < kLanes; ++lane) a[lane] = std::fma(a[lane], b[lane], c[lane]);
  modify(in, a);
  int r = in.operand[0].first;
  check_vector(wave, r, 1);
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t half = std::bit_cast<uint16_t>(static_cast<Half>(a[lane])), old = wave.v[r][lane];
    bits[lane] = kResult == MixResult::whole ? std::bit_cast<uint32_t>(a[lane])
                 : kResult == MixResult::low ? (old & 0xffff0000) | half
                                             : (old & 0xffff) | half << 16;
  }
  write_raw(wave, r, bits, wave.exec());
}

template <class T>
T smaller(T a, T b) {
  return a != a ? b : b != b ? a : b < a ? b : a;
}
template <class T>
T larger(T a, T b) {
  return a != a ? b : b != b ? a : a < b ? b : a;
}

}  // namespace

void define_packed(Registry& registry) {
  packed(registry, "v_pk_add_f32", [](float a, float b) { return a + b; });
  packed(registry, "v_pk_mul_f32", [](float a, float b) { return a * b; });
  packed(registry, "v_pk_fma_f32", [](float a, float b, float c) { return std::fma(a, b, c); });
  packed(registry, "v_pk_add_f16", [](Half a, Half b) { return static_cast<Half>(a + b); });
  packed(registry, "v_pk_mul_f16", [](Half a, Half b) { return static_cast<Half>(a * b); });
  packed(registry, "v_pk_fma_f16", [](Half a, Half b, Half c) {
    return static_cast<Half>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
  });
  packed(registry, "v_pk_min_f16", [](Half a, Half b) { return smaller(a, b); });
  packed(registry, "v_pk_max_f16", [](Half a, Half b) { return larger(a, b); });
  packed(registry, "v_pk_add_u16", [](uint16_t a, uint16_t b) { return static_cast<uint16_t>(a + b); });
  packed(registry, "v_pk_sub_u16", [](uint16_t a, uint16_t b) { return static_cast<uint16_t>(a - b); });
  packed(registry, "v_pk_add_i16", [](uint16_t a, uint16_t b) { return static_cast<uint16_t>(a + b); });
  packed(registry, "v_pk_sub_i16", [](uint16_t a, uint16_t b) { return static_cast<uint16_t>(a - b); });
  packed(registry, "v_pk_mul_lo_u16",
         [](uint16_t a, uint16_t b) { return static_cast<uint16_t>(static_cast<uint32_t>(a) * b); });
  packed(registry, "v_pk_min_u16", [](uint16_t a, uint16_t b) { return smaller(a, b); });
  packed(registry, "v_pk_max_u16", [](uint16_t a, uint16_t b) { return larger(a, b); });
  packed(registry, "v_pk_min_i16", [](int16_t a, int16_t b) { return smaller(a, b); });
  packed(registry, "v_pk_max_i16", [](int16_t a, int16_t b) { return larger(a, b); });
  packed(registry, "v_pk_lshlrev_b16", [](uint16_t a, uint16_t b) { return static_cast<uint16_t>(b << (a & 15)); });
  packed(registry, "v_pk_lshrrev_b16", [](uint16_t a, uint16_t b) { return static_cast<uint16_t>(b >> (a & 15)); });
  packed(registry, "v_pk_ashrrev_i16", [](uint16_t a, int16_t b) { return static_cast<int16_t>(b >> (a & 15)); });
  registry["v_pk_mov_b32"] = move_pair;
  registry["v_fma_mix_f32"] = mix<MixResult::whole>;
  registry["v_fma_mixlo_f16"] = mix<MixResult::low>;
  registry["v_fma_mixhi_f16"] = mix<MixResult::high>;
  registry["v_dot2_f32_f16"] = dot2<false, false>;
  registry["v_dot2_f32_bf16"] = dot2<true, false>;
  registry["v_dot2c_f32_f16"] = dot2<false, true>;
  registry["v_dot2c_f32_bf16"] = dot2<true, true>;
}

}  // namespace gfx9
