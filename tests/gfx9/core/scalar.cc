// Scalar instructions: SALU, branches, waits, and loads into scalar registers.
#include <algorithm>

#include "machine.h"
#include "registry.h"

namespace gfx9 {
namespace {

template <class T>
T source(const Wave& wave, const Operand& operand) {
  if constexpr (sizeof(T) == 8)
    return static_cast<T>(read_scalar64(wave, operand));
  else
    return static_cast<T>(read_scalar(wave, operand));
}

template <class T>
void result(Wave& wave, const Operand& operand, T value) {
  if constexpr (sizeof(T) == 8)
    write_scalar64(wave, operand, static_cast<uint64_t>(value));
  else
    write_scalar(wave, operand, static_cast<uint32_t>(value));
}

// A lambda (sources..., uint8_t& scc) -> result; the result is operand 0, the sources follow.
template <class F, class R, class... A>
struct Alu {
  static void run(Wave& wave, const Instruction& in) { apply(wave, in, std::make_index_sequence<sizeof...(A) - 1>{}); }
  template <size_t... I>
  static void apply(Wave& wave, const Instruction& in, std::index_sequence<I...>) {
    using Sources = std::tuple<A...>;
    uint8_t scc = wave.scc;
    R value = F{}(source<std::tuple_element_t<I, Sources>>(wave, in.operand[I + 1])..., scc);
    result<R>(wave, in.operand[0], value);
    wave.scc = scc;
  }
};

// A lambda (sources...) -> bool that sets SCC; operand 0 is the first source.
template <class F, class R, class... A>
struct Compare {
  static void run(Wave& wave, const Instruction& in) { apply(wave, in, std::make_index_sequence<sizeof...(A)>{}); }
  template <size_t... I>
  static void apply(Wave& wave, const Instruction& in, std::index_sequence<I...>) {
    wave.scc = F{}(source<A>(wave, in.operand[I])...);
  }
};

template <class F>
void alu(Registry& registry, const char* name, F) {
  registry[name] = Signature<F>::template Apply<Alu>::run;
}
template <class F>
void compare(Registry& registry, const std::string& name, F) {
  registry[name] = Signature<F>::template Apply<Compare>::run;
}

// A logic instruction in both widths, which sets SCC to "the result is not 0", and its form that saves EXEC.
template <class F>
void logic(Registry& registry, const std::string& name, F) {
  alu(registry, (name + "_b32").c_str(), [](uint32_t a, uint32_t b, uint8_t& scc) {
    uint32_t r = F{}(a, b);
    scc = r != 0;
    return r;
  });
  alu(registry, (name + "_b64").c_str(), [](uint64_t a, uint64_t b, uint8_t& scc) {
    uint64_t r = F{}(a, b);
    scc = r != 0;
    return r;
  });
  registry[name + "_saveexec_b64"] = [](Wave& wave, const Instruction& in) {
    uint64_t mask = read_scalar64(wave, in.operand[1]), exec = wave.exec();
    write_scalar64(wave, in.operand[0], exec);
    wave.set_scalar64(kExec, F{}(mask, exec));
    wave.scc = wave.exec() != 0;
  };
}

template <class T>
T bit_field(T value, uint32_t control) {  // first bit in the low half, width from bit 16
  constexpr int kBits = 8 * sizeof(T);
  uint32_t first = control & (kBits - 1), width = std::min<uint32_t>(control >> 16 & 0x7f, kBits);
  if (width == 0) return 0;
  using Unsigned = std::make_unsigned_t<T>;
  Unsigned shifted = static_cast<Unsigned>(value) >> first;
  if (width == kBits) return static_cast<T>(shifted);
  return static_cast<T>(static_cast<Unsigned>(shifted << (kBits - width))) >> (kBits - width);
}

void define_arithmetic(Registry& registry) {
  alu(registry, "s_add_u32", [](uint32_t a, uint32_t b, uint8_t& scc) { return scc = a + b < a, a + b; });
  alu(registry, "s_sub_u32", [](uint32_t a, uint32_t b, uint8_t& scc) { return scc = b > a, a - b; });
  alu(registry, "s_addc_u32", [](uint32_t a, uint32_t b, uint8_t& scc) {
    uint64_t sum = static_cast<uint64_t>(a) + b + scc;
    scc = sum >> 32 != 0;
    return static_cast<uint32_t>(sum);
  });
  alu(registry, "s_subb_u32", [](uint32_t a, uint32_t b, uint8_t& scc) {
    uint64_t subtrahend = static_cast<uint64_t>(b) + scc;
    scc = subtrahend > a;
    return static_cast<uint32_t>(a - subtrahend);
  });
  auto add = [](int32_t a, int32_t b, uint8_t& scc) {
    int32_t r;
    scc = __builtin_add_overflow(a, b, &r);
    return r;
  };
  alu(registry, "s_add_i32", add);
  registry["s_addk_i32"] = [](Wave& wave, const Instruction& in) {
    int32_t r;
    wave.scc = __builtin_add_overflow(static_cast<int32_t>(read_scalar(wave, in.operand[0])),
                                      static_cast<int32_t>(in.operand[1].bits32), &r);
    write_scalar(wave, in.operand[0], r);
  };
  registry["s_mulk_i32"] = [](Wave& wave, const Instruction& in) {
    write_scalar(wave, in.operand[0], read_scalar(wave, in.operand[0]) * in.operand[1].bits32);
  };
  registry["s_movk_i32"] = [](Wave& wave, const Instruction& in) {
    write_scalar(wave, in.operand[0], in.operand[1].bits32);
  };
  alu(registry, "s_sub_i32", [](int32_t a, int32_t b, uint8_t& scc) {
    int32_t r;
    scc = __builtin_sub_overflow(a, b, &r);
    return r;
  });
  alu(registry, "s_absdiff_i32", [](int32_t a, int32_t b, uint8_t& scc) {
    uint32_t r = a > b ? static_cast<uint32_t>(a) - b : static_cast<uint32_t>(b) - a;
    scc = r != 0;
    return r;
  });
  alu(registry, "s_abs_i32", [](int32_t a, uint8_t& scc) {
    uint32_t r = a < 0 ? 0u - a : a;
    scc = r != 0;
    return r;
  });
  alu(registry, "s_mul_i32", [](uint32_t a, uint32_t b, uint8_t&) { return a * b; });
  alu(registry, "s_mul_hi_u32",
      [](uint32_t a, uint32_t b, uint8_t&) { return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32); });
  alu(registry, "s_mul_hi_i32",
      [](int32_t a, int32_t b, uint8_t&) { return static_cast<int32_t>(static_cast<int64_t>(a) * b >> 32); });
  alu(registry, "s_min_i32", [](int32_t a, int32_t b, uint8_t& scc) { return scc = a < b, std::min(a, b); });
  alu(registry, "s_min_u32", [](uint32_t a, uint32_t b, uint8_t& scc) { return scc = a < b, std::min(a, b); });
  alu(registry, "s_max_i32", [](int32_t a, int32_t b, uint8_t& scc) { return scc = a > b, std::max(a, b); });
  alu(registry, "s_max_u32", [](uint32_t a, uint32_t b, uint8_t& scc) { return scc = a > b, std::max(a, b); });
}

template <int kShift>
void shift_and_add(Registry& registry) {
  alu(registry, ("s_lshl" + std::to_string(kShift) + "_add_u32").c_str(), [](uint32_t a, uint32_t b, uint8_t& scc) {
    uint64_t r = (static_cast<uint64_t>(a) << kShift) + b;
    scc = r >> 32 != 0;
    return static_cast<uint32_t>(r);
  });
}

template <class T>
T shifted(T value, uint8_t& scc) {
  scc = value != 0;
  return value;
}

void define_bits(Registry& registry) {
  logic(registry, "s_and", [](auto a, auto b) { return a & b; });
  logic(registry, "s_or", [](auto a, auto b) { return a | b; });
  logic(registry, "s_xor", [](auto a, auto b) { return a ^ b; });
  logic(registry, "s_andn1", [](auto a, auto b) { return ~a & b; });
  logic(registry, "s_andn2", [](auto a, auto b) { return a & ~b; });
  logic(registry, "s_orn1", [](auto a, auto b) { return ~a | b; });
  logic(registry, "s_orn2", [](auto a, auto b) { return a | ~b; });
  logic(registry, "s_nand", [](auto a, auto b) { return ~(a & b); });
  logic(registry, "s_nor", [](auto a, auto b) { return ~(a | b); });
  logic(registry, "s_xnor", [](auto a, auto b) { return ~(a ^ b); });

  alu(registry, "s_mov_b32", [](uint32_t a, uint8_t&) { return a; });
  alu(registry, "s_mov_b64", [](uint64_t a, uint8_t&) { return a; });
  alu(registry, "s_not_b32", [](uint32_t a, uint8_t& scc) { return shifted(~a, scc); });
  alu(registry, "s_not_b64", [](uint64_t a, uint8_t& scc) { return shifted(~a, scc); });
  alu(registry, "s_brev_b32", [](uint32_t a, uint8_t&) { return __builtin_bitreverse32(a); });
  alu(registry, "s_brev_b64", [](uint64_t a, uint8_t&) { return __builtin_bitreverse64(a); });
  alu(registry, "s_sext_i32_i8", [](uint32_t a, uint8_t&) { return static_cast<int32_t>(static_cast<int8_t>(a)); });
  alu(registry, "s_sext_i32_i16", [](uint32_t a, uint8_t&) { return static_cast<int32_t>(static_cast<int16_t>(a)); });

  alu(registry, "s_lshl_b32", [](uint32_t a, uint32_t b, uint8_t& scc) { return shifted(a << (b & 31), scc); });
  alu(registry, "s_lshl_b64", [](uint64_t a, uint32_t b, uint8_t& scc) { return shifted(a << (b & 63), scc); });
  alu(registry, "s_lshr_b32", [](uint32_t a, uint32_t b, uint8_t& scc) { return shifted(a >> (b & 31), scc); });
  alu(registry, "s_lshr_b64", [](uint64_t a, uint32_t b, uint8_t& scc) { return shifted(a >> (b & 63), scc); });
  alu(registry, "s_ashr_i32", [](int32_t a, uint32_t b, uint8_t& scc) { return shifted(a >> (b & 31), scc); });
  alu(registry, "s_ashr_i64", [](int64_t a, uint32_t b, uint8_t& scc) { return shifted(a >> (b & 63), scc); });
  shift_and_add<1>(registry);
  shift_and_add<2>(registry);
  shift_and_add<3>(registry);
  shift_and_add<4>(registry);

  alu(registry, "s_bfe_u32",
      [](uint32_t a, uint32_t b, uint8_t& scc) { return shifted(bit_field(a, b & ~0x20u), scc); });
  alu(registry, "s_bfe_i32",
      [](int32_t a, uint32_t b, uint8_t& scc) { return shifted(bit_field(a, b & ~0x20u), scc); });
  alu(registry, "s_bfe_u64", [](uint64_t a, uint32_t b, uint8_t& scc) { return shifted(bit_field(a, b), scc); });
  alu(registry, "s_bfe_i64", [](int64_t a, uint32_t b, uint8_t& scc) { return shifted(bit_field(a, b), scc); });
  alu(registry, "s_bfm_b32", [](uint32_t a, uint32_t b, uint8_t&) { return ((1u << (a & 31)) - 1) << (b & 31); });
  alu(registry, "s_bfm_b64", [](uint32_t a, uint32_t b, uint8_t&) { return ((1ull << (a & 63)) - 1) << (b & 63); });
  alu(registry, "s_pack_ll_b32_b16", [](uint32_t a, uint32_t b, uint8_t&) { return (a & 0xffff) | b << 16; });
  alu(registry, "s_pack_lh_b32_b16", [](uint32_t a, uint32_t b, uint8_t&) { return (a & 0xffff) | (b & 0xffff0000); });
  alu(registry, "s_pack_hh_b32_b16", [](uint32_t a, uint32_t b, uint8_t&) { return a >> 16 | (b & 0xffff0000); });

  alu(registry, "s_bcnt1_i32_b32", [](uint32_t a, uint8_t& scc) { return shifted(std::popcount(a), scc); });
  alu(registry, "s_bcnt1_i32_b64", [](uint64_t a, uint8_t& scc) { return shifted(std::popcount(a), scc); });
  alu(registry, "s_ff1_i32_b32", [](uint32_t a, uint8_t&) { return a ? std::countr_zero(a) : -1; });
  alu(registry, "s_ff1_i32_b64", [](uint64_t a, uint8_t&) { return a ? std::countr_zero(a) : -1; });
  alu(registry, "s_flbit_i32_b32", [](uint32_t a, uint8_t&) { return a ? std::countl_zero(a) : -1; });
  alu(registry, "s_flbit_i32_b64", [](uint64_t a, uint8_t&) { return a ? std::countl_zero(a) : -1; });

  alu(registry, "s_cselect_b32", [](uint32_t a, uint32_t b, uint8_t& scc) { return scc ? a : b; });
  alu(registry, "s_cselect_b64", [](uint64_t a, uint64_t b, uint8_t& scc) { return scc ? a : b; });
  registry["s_cmov_b32"] = [](Wave& wave, const Instruction& in) {
    if (wave.scc) write_scalar(wave, in.operand[0], read_scalar(wave, in.operand[1]));
  };
  registry["s_cmov_b64"] = [](Wave& wave, const Instruction& in) {
    if (wave.scc) write_scalar64(wave, in.operand[0], read_scalar64(wave, in.operand[1]));
  };
  registry["s_bitset0_b32"] = [](Wave& wave, const Instruction& in) {
    uint32_t bit = 1u << (read_scalar(wave, in.operand[1]) & 31);
    write_scalar(wave, in.operand[0], read_scalar(wave, in.operand[0]) & ~bit);
  };
  registry["s_bitset1_b32"] = [](Wave& wave, const Instruction& in) {
    uint32_t bit = 1u << (read_scalar(wave, in.operand[1]) & 31);
    write_scalar(wave, in.operand[0], read_scalar(wave, in.operand[0]) | bit);
  };
}

template <class T>
void compare_all(Registry& registry, const std::string& type) {
  for (const char* form : {"s_cmp_", "s_cmpk_"}) {
    compare(registry, form + ("eq_" + type), [](T a, T b) { return a == b; });
    compare(registry, form + ("lg_" + type), [](T a, T b) { return a != b; });
    compare(registry, form + ("lt_" + type), [](T a, T b) { return a < b; });
    compare(registry, form + ("le_" + type), [](T a, T b) { return a <= b; });
    compare(registry, form + ("gt_" + type), [](T a, T b) { return a > b; });
    compare(registry, form + ("ge_" + type), [](T a, T b) { return a >= b; });
  }
}

void define_compares(Registry& registry) {
  compare_all<int32_t>(registry, "i32");
  compare_all<uint32_t>(registry, "u32");
  compare(registry, "s_cmp_eq_u64", [](uint64_t a, uint64_t b) { return a == b; });
  compare(registry, "s_cmp_lg_u64", [](uint64_t a, uint64_t b) { return a != b; });
  compare(registry, "s_bitcmp0_b32", [](uint32_t a, uint32_t b) { return !(a >> (b & 31) & 1); });
  compare(registry, "s_bitcmp1_b32", [](uint32_t a, uint32_t b) { return (a >> (b & 31) & 1) != 0; });
  compare(registry, "s_bitcmp0_b64", [](uint64_t a, uint32_t b) { return !(a >> (b & 63) & 1); });
  compare(registry, "s_bitcmp1_b64", [](uint64_t a, uint32_t b) { return (a >> (b & 63) & 1) != 0; });
}

template <class F>
void branch(Registry& registry, const char* name, F) {
  registry[name] = [](Wave& wave, const Instruction& in) {
    if (F{}(wave)) wave.pc = in.target;
  };
}

uint64_t vcc(const Wave& wave) {
  check_scalar(wave, kVcc, 2);
  return wave.scalar64(kVcc);
}

void define_control(Registry& registry) {
  branch(registry, "s_branch", [](const Wave&) { return true; });
  branch(registry, "s_cbranch_scc0", [](const Wave& wave) { return !wave.scc; });
  branch(registry, "s_cbranch_scc1", [](const Wave& wave) { return wave.scc; });
  branch(registry, "s_cbranch_vccz", [](const Wave& wave) { return vcc(wave) == 0; });
  branch(registry, "s_cbranch_vccnz", [](const Wave& wave) { return vcc(wave) != 0; });
  branch(registry, "s_cbranch_execz", [](const Wave& wave) { return wave.exec() == 0; });
  branch(registry, "s_cbranch_execnz", [](const Wave& wave) { return wave.exec() != 0; });
  registry["s_barrier"] = [](Wave& wave, const Instruction&) { wave.state = State::at_barrier; };
  registry["s_endpgm"] = [](Wave& wave, const Instruction&) { wave.state = State::ended; };
  registry["s_trap"] = [](Wave&, const Instruction&) { throw Fault("s_trap"); };
  registry["s_waitcnt"] = [](Wave& wave, const Instruction& in) {
    wait_vm(wave, in.immediate[0]);
    wait_lgkm(wave, in.immediate[1]);
  };
  for (const char* name :
       {"s_nop", "s_sleep", "s_setprio", "s_icache_inv", "s_dcache_wb", "s_dcache_inv", "s_inst_prefetch"})
    registry[name] = [](Wave&, const Instruction&) {};
  registry["s_getpc_b64"] = [](Wave& wave, const Instruction& in) {
    write_scalar64(wave, in.operand[0], in.address + 4);
  };
}

// Register 1 is MODE, the only one modelled: decode.py refuses the others.
uint32_t field_mask(const Instruction& in) { return in.immediate[2] == 32 ? ~0u : (1u << in.immediate[2]) - 1; }

void set_mode(Wave& wave, const Instruction& in, uint32_t value) {
  uint32_t mask = field_mask(in) << in.immediate[1];
  wave.mode = (wave.mode & ~mask) | (value << in.immediate[1] & mask);
  if ((wave.mode & 0xff) != 0xf0) throw Fault("a rounding or denormal mode other than the default is not modelled");
}

void define_mode(Registry& registry) {
  registry["s_setreg_b32"] = [](Wave& wave, const Instruction& in) {
    set_mode(wave, in, read_scalar(wave, in.operand[0]));
  };
  registry["s_setreg_imm32_b32"] = registry["s_setreg_b32"];
  registry["s_getreg_b32"] = [](Wave& wave, const Instruction& in) {
    write_scalar(wave, in.operand[0], wave.mode >> in.immediate[1] & field_mask(in));
  };
}

template <int kCount>
void load(Registry& registry, const char* name) {
  registry[name] = [](Wave& wave, const Instruction& in) {
    uint64_t address = read_scalar64(wave, in.operand[1]) + read_scalar(wave, in.operand[2]) + in.offset[0];
    address &= ~3ull;
    issue(wave, {Source::scalar_load, false, in.operand[0].first, kCount, false, 0, {}});
    std::memcpy(&wave.s[in.operand[0].first], wave.group->memory->at(address, 4 * kCount, false, 0), 4 * kCount);
    wave.group->traffic.global_read += 4 * kCount;
  };
}

}  // namespace

void define_scalar(Registry& registry) {
  define_arithmetic(registry);
  define_bits(registry);
  define_compares(registry);
  define_control(registry);
  define_mode(registry);
  load<1>(registry, "s_load_dword");
  load<2>(registry, "s_load_dwordx2");
  load<4>(registry, "s_load_dwordx4");
  load<8>(registry, "s_load_dwordx8");
  load<16>(registry, "s_load_dwordx16");
}

}  // namespace gfx9
