// Loads and stores of global memory, FLAT (which may turn out to be LDS), loads straight into LDS, atomic operations.
#include <algorithm>

#include "floats.h"
#include "machine.h"
#include "registry.h"

namespace gfx9 {
namespace {

// The apertures are ours to choose: only src_shared_base tells a program of them.
constexpr uint64_t kSharedAperture = 0x00010000;

// `operand` is a 64-bit vector address, or a 32-bit one beside a scalar base; with a scalar base, `base` holds it.
void addresses(const Wave& wave, const Instruction& in, int operand, int base, uint64_t* out) {
  alignas(64) uint32_t low[kLanes], high[kLanes];
  read_raw(wave, in.operand[operand], 0, low);
  bool scalar_base = base < in.operands && in.operand[base].kind == Kind::scalar;
  if (scalar_base) {
    uint64_t from = read_scalar64(wave, in.operand[base]) + in.offset[0];
    for (int lane = 0; lane < kLanes; ++lane) out[lane] = from + low[lane];
    return;
  }
  read_raw(wave, in.operand[operand], 1, high);
  for (int lane = 0; lane < kLanes; ++lane)
    out[lane] = (low[lane] | static_cast<uint64_t>(high[lane]) << 32) + in.offset[0];
}

enum class Extend { none, sign8, sign16 };
enum class HalfOf { whole, low, high };

template <int kSize, Extend kExtend, HalfOf kHalf, bool kFlat>
void load(Wave& wave, const Instruction& in) {
  uint64_t address[kLanes];
  addresses(wave, in, 1, 2, address);
  constexpr uint16_t kRegisters = (kSize + 3) / 4;
  uint16_t first = in.operand[0].first;
  issue(wave, {kFlat ? Source::flat : Source::vector_load, true, first, kRegisters, false, 0, {}});
  uint64_t exec = wave.exec();
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!active(exec, lane)) continue;
    uint32_t words[kRegisters] = {};
    if (kFlat && address[lane] >> 32 == kSharedAperture) {
      std::memcpy(words, wave.group->lds.read<kSize>(wave.id, static_cast<uint32_t>(address[lane])), kSize);
      wave.group->traffic.lds_read += kSize;
    } else {
      std::memcpy(words, wave.group->memory->at(address[lane], kSize, false, lane), kSize);
      wave.group->traffic.global_read += kSize;
    }
    if (kExtend == Extend::sign8) words[0] = static_cast<uint32_t>(static_cast<int8_t>(words[0]));
    if (kExtend == Extend::sign16) words[0] = static_cast<uint32_t>(static_cast<int16_t>(words[0]));
    uint32_t old = wave.v[first][lane];
    if (kHalf == HalfOf::low) words[0] = (old & 0xffff0000) | (words[0] & 0xffff);
    if (kHalf == HalfOf::high) words[0] = (old & 0xffff) | words[0] << 16;
    for (int r = 0; r < kRegisters; ++r) wave.v[first + r][lane] = words[r];
  }
}

template <int kSize, bool kHigh, bool kFlat>
void store(Wave& wave, const Instruction& in) {
  uint64_t address[kLanes];
  addresses(wave, in, 0, 2, address);
  constexpr int kRegisters = (kSize + 3) / 4;
  check_vector(wave, in.operand[1].first, kRegisters);
  issue(wave, {kFlat ? Source::flat : Source::store, true, 0, 0, false, 0, {}});
  uint64_t exec = wave.exec();
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!active(exec, lane)) continue;
    uint32_t words[kRegisters];
    for (int r = 0; r < kRegisters; ++r) words[r] = wave.v[in.operand[1].first + r][lane] >> (kHigh ? 16 : 0);
    if (kFlat && address[lane] >> 32 == kSharedAperture) {
      std::memcpy(wave.group->lds.write<kSize>(wave.id, static_cast<uint32_t>(address[lane])), words, kSize);
      wave.group->traffic.lds_written += kSize;
    } else {
      std::memcpy(wave.group->memory->at(address[lane], kSize, true, lane), words, kSize);
      wave.group->traffic.global_written += kSize;
    }
  }
}

// Into LDS from M0 on, lane after lane; the offset counts on both sides.
template <int kSize>
void load_to_lds(Wave& wave, const Instruction& in) {
  uint64_t address[kLanes];
  addresses(wave, in, 0, 1, address);
  check_scalar(wave, kM0, 1);
  uint32_t base = wave.s[kM0] & (wave.group->architecture == Architecture::gfx942 ? 0xffff : 0x3ffff);
  std::vector<uint32_t> at;
  uint64_t exec = wave.exec();
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!active(exec, lane)) continue;
    uint32_t offset = base + in.offset[0] + lane * kSize;
    const char* from = wave.group->memory->at(address[lane], kSize, false, lane);
    std::memcpy(wave.group->lds.write<kSize>(wave.id, offset), from, kSize);
    wave.group->traffic.global_read += kSize;
    wave.group->traffic.lds_written += kSize;
    at.push_back(offset);
  }
  if (wave.group->check_waits) wave.group->lds.direct_issued(at, kSize);
  issue(wave, {Source::direct_load, true, 0, 0, true, kSize, std::move(at)});
}

// A lambda (old, value) -> new. Lanes take their turns in order.
template <class F, class R, class A, class B>
struct Atomic {
  static void run(Wave& wave, const Instruction& in) {
    constexpr int kRegisters = sizeof(R) / 4;
    int shift = in.returns;
    uint64_t address[kLanes];
    addresses(wave, in, shift, shift + 2, address);
    const Operand& data = in.operand[shift + 1];
    check_vector(wave, data.first, data.count);
    if (in.returns)
      issue(wave, {Source::vector_load, true, in.operand[0].first, kRegisters, false, 0, {}});
    else
      issue(wave, {Source::store, true, 0, 0, false, 0, {}});
    uint64_t exec = wave.exec();
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!active(exec, lane)) continue;
      char* at = wave.group->memory->at(address[lane], sizeof(R), true, lane);
      R old, updated;
      std::memcpy(&old, at, sizeof(R));
      updated = F{}(old, value(wave, data.first, lane));
      std::memcpy(at, &updated, sizeof(R));
      wave.group->traffic.global_read += sizeof(R);
      wave.group->traffic.global_written += sizeof(R);
      if (!in.returns) continue;
      uint32_t words[kRegisters];
      std::memcpy(words, &old, sizeof(R));
      for (int r = 0; r < kRegisters; ++r) wave.v[in.operand[0].first + r][lane] = words[r];
    }
  }
  static B value(const Wave& wave, int first, int lane) {
    uint32_t words[sizeof(B) / 4];
    for (size_t r = 0; r < sizeof(B) / 4; ++r) words[r] = wave.v[first + r][lane];
    return std::bit_cast<B>(words);
  }
};

template <class F>
void atomic(Registry& registry, const char* name, F) {
  registry[std::string("global_atomic_") + name] = Signature<F>::template Apply<Atomic>::run;
}

// Of cmpswap: the new value first, then what memory must hold.
template <class T>
struct Exchange {
  T value, expected;
};

template <class T>
void define_integer_atomics(Registry& registry, const std::string& width) {
  using S = std::make_signed_t<T>;
  atomic(registry, ("add" + width).c_str(), [](T a, T b) { return a + b; });
  atomic(registry, ("sub" + width).c_str(), [](T a, T b) { return a - b; });
  atomic(registry, ("and" + width).c_str(), [](T a, T b) { return a & b; });
  atomic(registry, ("or" + width).c_str(), [](T a, T b) { return a | b; });
  atomic(registry, ("xor" + width).c_str(), [](T a, T b) { return a ^ b; });
  atomic(registry, ("swap" + width).c_str(), [](T, T b) { return b; });
  atomic(registry, ("umin" + width).c_str(), [](T a, T b) { return std::min(a, b); });
  atomic(registry, ("umax" + width).c_str(), [](T a, T b) { return std::max(a, b); });
  atomic(registry, ("smin" + width).c_str(), [](S a, S b) { return std::min(a, b); });
  atomic(registry, ("smax" + width).c_str(), [](S a, S b) { return std::max(a, b); });
  atomic(registry, ("cmpswap" + width).c_str(), [](T a, Exchange<T> b) { return a == b.expected ? b.value : a; });
}

template <bool kFlat>
void define_accesses(Registry& registry, const std::string& kind) {
  registry[kind + "_load_ubyte"] = load<1, Extend::none, HalfOf::whole, kFlat>;
  registry[kind + "_load_sbyte"] = load<1, Extend::sign8, HalfOf::whole, kFlat>;
  registry[kind + "_load_ushort"] = load<2, Extend::none, HalfOf::whole, kFlat>;
  registry[kind + "_load_sshort"] = load<2, Extend::sign16, HalfOf::whole, kFlat>;
  registry[kind + "_load_ubyte_d16"] = load<1, Extend::none, HalfOf::low, kFlat>;
  registry[kind + "_load_ubyte_d16_hi"] = load<1, Extend::none, HalfOf::high, kFlat>;
  registry[kind + "_load_sbyte_d16"] = load<1, Extend::sign8, HalfOf::low, kFlat>;
  registry[kind + "_load_sbyte_d16_hi"] = load<1, Extend::sign8, HalfOf::high, kFlat>;
  registry[kind + "_load_short_d16"] = load<2, Extend::none, HalfOf::low, kFlat>;
  registry[kind + "_load_short_d16_hi"] = load<2, Extend::none, HalfOf::high, kFlat>;
  registry[kind + "_load_dword"] = load<4, Extend::none, HalfOf::whole, kFlat>;
  registry[kind + "_load_dwordx2"] = load<8, Extend::none, HalfOf::whole, kFlat>;
  registry[kind + "_load_dwordx3"] = load<12, Extend::none, HalfOf::whole, kFlat>;
  registry[kind + "_load_dwordx4"] = load<16, Extend::none, HalfOf::whole, kFlat>;
  registry[kind + "_store_byte"] = store<1, false, kFlat>;
  registry[kind + "_store_byte_d16_hi"] = store<1, true, kFlat>;
  registry[kind + "_store_short"] = store<2, false, kFlat>;
  registry[kind + "_store_short_d16_hi"] = store<2, true, kFlat>;
  registry[kind + "_store_dword"] = store<4, false, kFlat>;
  registry[kind + "_store_dwordx2"] = store<8, false, kFlat>;
  registry[kind + "_store_dwordx3"] = store<12, false, kFlat>;
  registry[kind + "_store_dwordx4"] = store<16, false, kFlat>;
}

}  // namespace

void define_global(Registry& registry) {
  define_accesses<false>(registry, "global");
  define_accesses<true>(registry, "flat");
  registry["global_load_lds_dword"] = load_to_lds<4>;
  registry["global_load_lds_dwordx3"] = load_to_lds<12>;
  registry["global_load_lds_dwordx4"] = load_to_lds<16>;
  define_integer_atomics<uint32_t>(registry, "");
  define_integer_atomics<uint64_t>(registry, "_x2");
  atomic(registry, "add_f32", [](float a, float b) { return a + b; });
  // Caches are not modelled: memory is always seen by everyone.
  for (const char* name : {"buffer_wbl2", "buffer_inv"}) registry[name] = [](Wave&, const Instruction&) {};
}

}  // namespace gfx9
