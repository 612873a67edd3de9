// State of a wave, its workgroup and the device: registers, counters of outstanding memory operations, LDS, memory.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "instruction.h"
#include "memory.h"

namespace gfx9 {

constexpr int kVcc = 106, kM0 = 124, kExec = 126;
constexpr int kVectorRegisters = 512, kScalarRegisters = 128;
constexpr uint32_t kModeFp16Overflow = 1u << 23;  // conversions clamp instead of giving infinity or NaN

enum class Architecture : int32_t { gfx942, gfx950 };
enum class State : uint8_t { running, at_barrier, ended };
enum class Source : uint8_t { store, vector_load, direct_load, lds, scalar_load, flat };

// A memory operation that s_waitcnt may not have waited for.
struct Outstanding {
  Source source;
  bool vector;            // its results are vector registers
  uint16_t first, count;  // result registers
  bool writes_lds;
  uint32_t lds_size;  // bytes at each of lds_offsets
  std::vector<uint32_t> lds_offsets;
};

struct Group {
  Lds lds;
  Memory* memory;
  Architecture architecture;
  bool check_waits;
  Traffic traffic;
};

struct Wave {
  alignas(64) uint32_t v[kVectorRegisters][kLanes];
  uint32_t s[kScalarRegisters];
  uint8_t scc;
  uint32_t mode;
  int id;
  int pc;  // index of the next instruction
  State state;
  Group* group;
  // Operations outstanding on each register, by the counter that tells of their end.
  std::array<uint8_t, kVectorRegisters> vector_vm, vector_lgkm;
  std::array<uint8_t, kScalarRegisters> scalar_lgkm;
  std::deque<Outstanding> vm, lgkm;

  uint64_t scalar64(int r) const { return s[r] | static_cast<uint64_t>(s[r + 1]) << 32; }
  void set_scalar64(int r, uint64_t value) {
    s[r] = static_cast<uint32_t>(value);
    s[r + 1] = static_cast<uint32_t>(value >> 32);
  }
  uint64_t exec() const { return scalar64(kExec); }
};

inline bool active(uint64_t mask, int lane) { return mask >> lane & 1; }

// ---- Missing waits

inline std::string vector_name(int r) { return (r < 256 ? "v" : "a") + std::to_string(r % 256); }

[[noreturn]] inline void missing_wait(const std::string& name, const char* counter) {
  throw Fault("missing wait: " + name + " is the result of a load that no s_waitcnt " + counter + " has waited for");
}

inline void check_vector(const Wave& wave, int first, int count) {
  for (int r = first; r < first + count; ++r) {
    if (wave.vector_vm[r]) missing_wait(vector_name(r), "vmcnt");
    if (wave.vector_lgkm[r]) missing_wait(vector_name(r), "lgkmcnt");
  }
}

inline void check_scalar(const Wave& wave, int first, int count) {
  for (int r = first; r < first + count; ++r)
    if (wave.scalar_lgkm[r]) missing_wait("s" + std::to_string(r), "lgkmcnt");
}

inline void count_registers(Wave& wave, const Outstanding& operation, bool vm, int change) {
  uint8_t* counts = !operation.vector ? wave.scalar_lgkm.data() : vm ? wave.vector_vm.data() : wave.vector_lgkm.data();
  for (int r = operation.first; r < operation.first + operation.count; ++r) counts[r] += change;
}

// An operation has left for memory. Results of one kind arrive in order, so that two loads may share a register; loads
// that count differently may not.
inline void issue(Wave& wave, Outstanding operation) {
  if (!wave.group->check_waits) return;
  bool vm = operation.source != Source::lds && operation.source != Source::scalar_load;
  bool lgkm = !vm || operation.source == Source::flat;
  if (operation.vector) {
    for (int r = operation.first; r < operation.first + operation.count; ++r) {
      if (lgkm && wave.vector_vm[r]) missing_wait(vector_name(r), "vmcnt");
      if (vm && wave.vector_lgkm[r]) missing_wait(vector_name(r), "lgkmcnt");
    }
  } else {
    check_scalar(wave, operation.first, operation.count);
  }
  if (vm) {
    count_registers(wave, operation, true, 1);
    wave.vm.push_back(operation);
  }
  if (lgkm) {
    count_registers(wave, operation, false, 1);
    wave.lgkm.push_back(std::move(operation));
  }
}

// Vector memory operations end in order, and so do LDS operations. Scalar loads and FLAT end in any order: only a wait
// for 0 tells of them.
inline void wait_vm(Wave& wave, size_t left) {
  while (wave.vm.size() > left) {
    count_registers(wave, wave.vm.front(), true, -1);
    if (wave.vm.front().source == Source::direct_load)
      wave.group->lds.direct_ended(wave.vm.front().lds_offsets, wave.vm.front().lds_size);
    wave.vm.pop_front();
  }
}

inline void wait_lgkm(Wave& wave, size_t left) {
  size_t lds = 0;
  for (const Outstanding& operation : wave.lgkm) lds += operation.source == Source::lds;
  for (auto operation = wave.lgkm.begin(); operation != wave.lgkm.end();) {
    bool ended = left == 0;
    if (operation->source == Source::lds) ended = lds-- > left;
    if (ended) {
      count_registers(wave, *operation, false, -1);
      operation = wave.lgkm.erase(operation);
    } else {
      ++operation;
    }
  }
}

// The workgroup has passed a barrier: what this wave has not waited for may still happen after it.
inline void carry_past_barrier(Wave& wave) {
  Lds& lds = wave.group->lds;
  for (const auto* queue : {&wave.vm, &wave.lgkm})
    for (const Outstanding& operation : *queue)
      if (!operation.lds_offsets.empty())
        lds.restamp(wave.id, operation.lds_offsets, operation.lds_size, operation.writes_lds);
}

// ---- Operands

// 32 bits of each lane; `part` counts registers of a wider operand.
inline void read_raw(const Wave& wave, const Operand& operand, int part, uint32_t* out) {
  switch (operand.kind) {
    case Kind::vector:
      check_vector(wave, operand.first + part, 1);
      std::memcpy(out, wave.v[operand.first + part], sizeof(wave.v[0]));
      return;
    case Kind::scalar:
      check_scalar(wave, operand.first + part, 1);
      std::fill_n(out, kLanes, wave.s[operand.first + part]);
      return;
    case Kind::constant:
      std::fill_n(out, kLanes, part ? static_cast<uint32_t>(operand.bits64 >> 32) : operand.bits32);
      return;
    case Kind::scc: std::fill_n(out, kLanes, wave.scc); return;
    case Kind::none: break;
  }
  throw Fault("an operand is missing");
}

inline uint32_t select_bits(uint32_t value, int select, bool sign_extend) {
  if (select == 0) return value;
  if (select <= 4) {
    value = value >> 8 * (select - 1) & 0xff;
    return sign_extend ? static_cast<uint32_t>(static_cast<int8_t>(value)) : value;
  }
  value = value >> 16 * (select - 5) & 0xffff;
  return sign_extend ? static_cast<uint32_t>(static_cast<int16_t>(value)) : value;
}

// DPP: lanes whose source lane exists and is active.
inline uint64_t dpp_sources(const Wave& wave, const Instruction& in) {
  uint64_t mask = 0, exec = wave.exec();
  for (int lane = 0; lane < kLanes; ++lane)
    if (active(in.lane_valid, lane) && active(exec, in.lane_source[lane])) mask |= 1ull << lane;
  return mask;
}

template <class T>
void read_wide(const Wave& wave, const Instruction& in, int index, int k, T* out) {
  const Operand& operand = in.operand[index];
  if (in.dpp && k == 0) throw Fault("DPP of a 64-bit operand is not modelled");
  alignas(64) uint32_t low[kLanes], high[kLanes];
  if (operand.kind == Kind::constant) {
    std::fill_n(low, kLanes, static_cast<uint32_t>(operand.bits64));
    std::fill_n(high, kLanes, static_cast<uint32_t>(operand.bits64 >> 32));
  } else {
    read_raw(wave, operand, 0, low);
    read_raw(wave, operand, 1, high);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    uint64_t bits = low[lane] | static_cast<uint64_t>(high[lane]) << 32;
    if (operand.absolute) bits &= ~(1ull << 63);
    if (operand.negate) bits ^= 1ull << 63;
    out[lane] = std::bit_cast<T>(bits);
  }
}

template <class T>
void read_narrow(const Wave& wave, const Instruction& in, int index, int k, T* out) {
  const Operand& operand = in.operand[index];
  constexpr bool kIsHalf = sizeof(T) == 2;
  alignas(64) uint32_t bits[kLanes];
  if (kIsHalf && operand.kind == Kind::constant) {
    std::fill_n(bits, kLanes, operand.bits16);
  } else {
    read_raw(wave, operand, 0, bits);
    if (kIsHalf && k < 4 && in.op_sel[k])
      for (uint32_t& value : bits) value >>= 16;
  }
  if (in.sdwa && operand.select)
    for (uint32_t& value : bits) value = select_bits(value, operand.select, operand.sign_extend);
  if (in.dpp && k == 0) {
    uint64_t sources = dpp_sources(wave, in);
    alignas(64) uint32_t moved[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) moved[lane] = active(sources, lane) ? bits[in.lane_source[lane]] : 0;
    std::memcpy(bits, moved, sizeof(bits));
  }
  constexpr uint32_t kSign = kIsHalf ? 0x8000 : 0x80000000;
  if (operand.absolute)
    for (uint32_t& value : bits) value &= ~kSign;
  if (operand.negate)
    for (uint32_t& value : bits) value ^= kSign;
  using Bits = std::conditional_t<kIsHalf, uint16_t, uint32_t>;
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = std::bit_cast<T>(static_cast<Bits>(bits[lane]));
}

// Operand `index` of the text, which is source `k` (for op_sel), as values of T in each lane.
template <class T>
void read(const Wave& wave, const Instruction& in, int index, int k, T* out) {
  if constexpr (sizeof(T) == 8)
    read_wide(wave, in, index, k, out);
  else
    read_narrow(wave, in, index, k, out);
}

inline uint32_t read_scalar(const Wave& wave, const Operand& operand) {
  switch (operand.kind) {
    case Kind::scalar: check_scalar(wave, operand.first, 1); return wave.s[operand.first];
    case Kind::constant: return operand.bits32;
    case Kind::scc: return wave.scc;
    default: throw Fault("a scalar operand is expected");
  }
}

inline uint64_t read_scalar64(const Wave& wave, const Operand& operand) {
  switch (operand.kind) {
    case Kind::scalar: check_scalar(wave, operand.first, 2); return wave.scalar64(operand.first);
    case Kind::constant: return operand.bits64;
    case Kind::scc: return wave.scc;
    default: throw Fault("a scalar operand is expected");
  }
}

inline void write_scalar(Wave& wave, const Operand& operand, uint32_t value) {
  check_scalar(wave, operand.first, 1);
  wave.s[operand.first] = value;
}

inline void write_scalar64(Wave& wave, const Operand& operand, uint64_t value) {
  check_scalar(wave, operand.first, 2);
  wave.set_scalar64(operand.first, value);
}

// One register, in the lanes of `mask`.
inline void write_raw(Wave& wave, int r, const uint32_t* values, uint64_t mask) {
  check_vector(wave, r, 1);
  uint32_t* to = wave.v[r];
  if (mask == ~0ull) {
    std::memcpy(to, values, sizeof(wave.v[0]));
    return;
  }
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = active(mask, lane) ? values[lane] : to[lane];
}

inline uint64_t write_mask(const Wave& wave, const Instruction& in) {
  uint64_t mask = wave.exec();
  if (in.dpp) mask &= in.lane_enabled & (in.bound_zero ? ~0ull : dpp_sources(wave, in));
  return mask;
}

// SDWA results: a part of the register, the rest zero, sign or kept.
inline void place_selected(const Wave& wave, const Instruction& in, int r, uint32_t* values) {
  int bits = in.result_select <= 4 ? 8 : 16;
  int shift = in.result_select <= 4 ? 8 * (in.result_select - 1) : 16 * (in.result_select - 5);
  uint32_t mask = ((1u << bits) - 1) << shift;
  if (in.result_unused == 1) throw Fault("dst_unused:UNUSED_SEXT is not modelled");
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t rest = in.result_unused == 2 ? wave.v[r][lane] & ~mask : 0;
    values[lane] = rest | (values[lane] << shift & mask);
  }
}

// `sources` is the number of sources: op_sel behind them picks the half that a 16-bit result goes to. A low half clears
// the high one, as on every GFX9.
template <class T>
void write(Wave& wave, const Instruction& in, int index, const T* values, int sources = 4) {
  int r = in.operand[index].first;
  uint64_t mask = write_mask(wave, in);
  alignas(64) uint32_t low[kLanes];
  if constexpr (sizeof(T) == 8) {
    alignas(64) uint32_t high[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      uint64_t bits = std::bit_cast<uint64_t>(values[lane]);
      low[lane] = static_cast<uint32_t>(bits);
      high[lane] = static_cast<uint32_t>(bits >> 32);
    }
    write_raw(wave, r, low, mask);
    write_raw(wave, r + 1, high, mask);
    return;
  }
  bool high_half = sizeof(T) == 2 && sources < 4 && in.op_sel[sources];
  for (int lane = 0; lane < kLanes; ++lane) {
    if constexpr (sizeof(T) == 2) {
      low[lane] = std::bit_cast<uint16_t>(values[lane]);
      if (high_half) low[lane] = low[lane] << 16 | (wave.v[r][lane] & 0xffff);
    } else if constexpr (sizeof(T) == 4) {
      low[lane] = std::bit_cast<uint32_t>(values[lane]);
    }
  }
  if (in.sdwa && in.result_select) place_selected(wave, in, r, low);
  write_raw(wave, r, low, mask);
}

}  // namespace gfx9
