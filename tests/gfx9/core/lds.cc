// LDS instructions: reads, writes, transposing reads, atomic operations, and the moves between lanes that use its
// paths.
#include <algorithm>

#include "machine.h"
#include "registry.h"

namespace gfx9 {
namespace {

// Byte offsets of the active lanes for the access at in.offset[which].
std::vector<uint32_t> offsets(const Wave& wave, const Instruction& in, const uint32_t* address, int which) {
  std::vector<uint32_t> result;
  result.reserve(kLanes);
  for (int lane = 0; lane < kLanes; ++lane)
    if (active(wave.exec(), lane)) result.push_back(address[lane] + in.offset[which]);
  return result;
}

enum class Extend { none, sign8, sign16 };
enum class HalfOf { whole, low, high };

uint32_t extend(uint32_t value, Extend how) {
  if (how == Extend::sign8) return static_cast<uint32_t>(static_cast<int8_t>(value));
  if (how == Extend::sign16) return static_cast<uint32_t>(static_cast<int16_t>(value));
  return value;
}

template <int kSize, int kAccesses, Extend kExtend, HalfOf kHalf>
void read(Wave& wave, const Instruction& in) {
  alignas(64) uint32_t address[kLanes];
  read_raw(wave, in.operand[1], 0, address);
  constexpr int kRegisters = (kSize + 3) / 4;
  uint16_t first = in.operand[0].first;
  uint64_t exec = wave.exec();
  std::vector<uint32_t> all;
  for (int which = 0; which < kAccesses; ++which) {
    std::vector<uint32_t> at = offsets(wave, in, address, which);
    all.insert(all.end(), at.begin(), at.end());
  }
  uint16_t count = kRegisters * kAccesses;
  issue(wave, {Source::lds, true, first, count, false, kSize, all});
  alignas(64) uint32_t values[kRegisters * kAccesses][kLanes];
  size_t next = 0;
  for (int which = 0; which < kAccesses; ++which)
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!active(exec, lane)) continue;
      uint32_t words[kRegisters] = {};
      std::memcpy(words, wave.group->lds.read<kSize>(wave.id, all[next++]), kSize);
      for (int r = 0; r < kRegisters; ++r) values[which * kRegisters + r][lane] = words[r];
    }
  wave.group->traffic.lds_read += all.size() * kSize;
  for (int r = 0; r < count; ++r)
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!active(exec, lane)) continue;
      uint32_t& to = wave.v[first + r][lane];
      uint32_t value = extend(values[r][lane], kExtend);
      if (kHalf == HalfOf::low) value = (to & 0xffff0000) | (value & 0xffff);
      if (kHalf == HalfOf::high) value = (to & 0xffff) | value << 16;
      to = value;
    }
}

template <int kSize, int kAccesses, bool kHigh>
void write(Wave& wave, const Instruction& in) {
  alignas(64) uint32_t address[kLanes];
  read_raw(wave, in.operand[0], 0, address);
  constexpr int kRegisters = (kSize + 3) / 4;
  for (int which = 0; which < kAccesses; ++which) {
    std::vector<uint32_t> at = offsets(wave, in, address, which);
    alignas(64) uint32_t values[kRegisters][kLanes];
    for (int r = 0; r < kRegisters; ++r) {
      read_raw(wave, in.operand[1 + which], r, values[r]);
      if (kHigh)
        for (uint32_t& value : values[r]) value >>= 16;
    }
    size_t next = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!active(wave.exec(), lane)) continue;
      uint32_t words[kRegisters];
      for (int r = 0; r < kRegisters; ++r) words[r] = values[r][lane];
      std::memcpy(wave.group->lds.write<kSize>(wave.id, at[next++]), words, kSize);
    }
    wave.group->traffic.lds_written += at.size() * kSize;
    // One instruction counts once, whatever its number of accesses.
    if (which == 0)
      issue(wave, {Source::lds, true, 0, 0, true, kSize, std::move(at)});
    else if (wave.group->check_waits)
      wave.lgkm.back().lds_offsets.insert(wave.lgkm.back().lds_offsets.end(), at.begin(), at.end());
  }
}

// Each group of 16 lanes reads 16 * 8 bytes; element q of destination lane i is element i % n of source lane
// q * 16 / n + i / n, with n elements of T in 8 bytes. EXEC must be full.
template <class T>
void read_transposed(Wave& wave, const Instruction& in) {
  constexpr int n = 8 / sizeof(T);
  if (wave.exec() != ~0ull) throw Fault("a transposing read with inactive lanes is not modelled");
  alignas(64) uint32_t address[kLanes];
  read_raw(wave, in.operand[1], 0, address);
  std::vector<uint32_t> at = offsets(wave, in, address, 0);
  issue(wave, {Source::lds, true, in.operand[0].first, 2, false, 8, at});
  T elements[kLanes][n];
  for (int lane = 0; lane < kLanes; ++lane) std::memcpy(elements[lane], wave.group->lds.read<8>(wave.id, at[lane]), 8);
  for (int lane = 0; lane < kLanes; ++lane) {
    int i = lane % 16;
    T moved[n];
    for (int q = 0; q < n; ++q) moved[q] = elements[lane - i + q * 16 / n + i / n][i % n];
    uint32_t words[2];
    std::memcpy(words, moved, 8);
    wave.v[in.operand[0].first][lane] = words[0];
    wave.v[in.operand[0].first + 1][lane] = words[1];
  }
  wave.group->traffic.lds_read += kLanes * 8;
}

// Moves between lanes go through LDS hardware and count like its reads, but touch no byte of it.
void deliver(Wave& wave, const Instruction& in, const uint32_t* values) {
  issue(wave, {Source::lds, true, in.operand[0].first, 1, false, 0, {}});
  for (int lane = 0; lane < kLanes; ++lane)
    if (active(wave.exec(), lane)) wave.v[in.operand[0].first][lane] = values[lane];
}

void bpermute(Wave& wave, const Instruction& in) {
  alignas(64) uint32_t address[kLanes], values[kLanes], moved[kLanes];
  read_raw(wave, in.operand[1], 0, address);
  read_raw(wave, in.operand[2], 0, values);
  for (int lane = 0; lane < kLanes; ++lane) {
    int from = (address[lane] + in.offset[0]) / 4 % kLanes;
    moved[lane] = active(wave.exec(), from) ? values[from] : 0;
  }
  deliver(wave, in, moved);
}

void permute(Wave& wave, const Instruction& in) {
  alignas(64) uint32_t address[kLanes], values[kLanes], moved[kLanes] = {};
  read_raw(wave, in.operand[1], 0, address);
  read_raw(wave, in.operand[2], 0, values);
  for (int lane = 0; lane < kLanes; ++lane)
    if (active(wave.exec(), lane)) moved[(address[lane] + in.offset[0]) / 4 % kLanes] = values[lane];
  deliver(wave, in, moved);
}

void swizzle(Wave& wave, const Instruction& in) {
  alignas(64) uint32_t values[kLanes], moved[kLanes];
  read_raw(wave, in.operand[1], 0, values);
  for (int lane = 0; lane < kLanes; ++lane)
    moved[lane] = active(wave.exec(), in.lane_source[lane]) ? values[in.lane_source[lane]] : 0;
  deliver(wave, in, moved);
}

// Lanes take their turns in order.
template <class F, class R, class A, class B>
struct Atomic {
  template <bool kReturns>
  static void run(Wave& wave, const Instruction& in) {
    alignas(64) uint32_t address[kLanes], values[kLanes];
    read_raw(wave, in.operand[kReturns], 0, address);
    read_raw(wave, in.operand[kReturns + 1], 0, values);
    if (kReturns)
      issue(wave, {Source::lds, true, in.operand[0].first, 1, false, 0, {}});
    else
      issue(wave, {Source::lds, true, 0, 0, false, 0, {}});
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!active(wave.exec(), lane)) continue;
      char* at = wave.group->lds.atomic(address[lane] + in.offset[0], 4);
      R old;
      std::memcpy(&old, at, 4);
      R updated = F{}(old, std::bit_cast<R>(values[lane]));
      std::memcpy(at, &updated, 4);
      if (kReturns) wave.v[in.operand[0].first][lane] = std::bit_cast<uint32_t>(old);
    }
  }
};

template <class F>
void atomic(Registry& registry, const std::string& operation, const std::string& type, F) {
  using Operation = typename Signature<F>::template Apply<Atomic>;
  registry["ds_" + operation + "_" + type] = &Operation::template run<false>;
  registry["ds_" + operation + "_rtn_" + type] = &Operation::template run<true>;
}

template <int kSize>
void define_accesses(Registry& registry, const std::string& type) {
  registry["ds_read_" + type] = read<kSize, 1, Extend::none, HalfOf::whole>;
  registry["ds_write_" + type] = write<kSize, 1, false>;
  if constexpr (kSize == 4 || kSize == 8)
    for (const char* form : {"2_", "2st64_"}) {
      registry["ds_read" + (form + type)] = read<kSize, 2, Extend::none, HalfOf::whole>;
      registry["ds_write" + (form + type)] = write<kSize, 2, false>;
    }
}

}  // namespace

void define_lds(Registry& registry) {
  define_accesses<4>(registry, "b32");
  define_accesses<8>(registry, "b64");
  define_accesses<12>(registry, "b96");
  define_accesses<16>(registry, "b128");
  registry["ds_write_b8"] = write<1, 1, false>;
  registry["ds_write_b16"] = write<2, 1, false>;
  registry["ds_write_b8_d16_hi"] = write<1, 1, true>;
  registry["ds_write_b16_d16_hi"] = write<2, 1, true>;
  registry["ds_read_u8"] = read<1, 1, Extend::none, HalfOf::whole>;
  registry["ds_read_i8"] = read<1, 1, Extend::sign8, HalfOf::whole>;
  registry["ds_read_u16"] = read<2, 1, Extend::none, HalfOf::whole>;
  registry["ds_read_i16"] = read<2, 1, Extend::sign16, HalfOf::whole>;
  registry["ds_read_u8_d16"] = read<1, 1, Extend::none, HalfOf::low>;
  registry["ds_read_u8_d16_hi"] = read<1, 1, Extend::none, HalfOf::high>;
  registry["ds_read_i8_d16"] = read<1, 1, Extend::sign8, HalfOf::low>;
  registry["ds_read_i8_d16_hi"] = read<1, 1, Extend::sign8, HalfOf::high>;
  registry["ds_read_u16_d16"] = read<2, 1, Extend::none, HalfOf::low>;
  registry["ds_read_u16_d16_hi"] = read<2, 1, Extend::none, HalfOf::high>;
  registry["ds_read_b64_tr_b16"] = read_transposed<uint16_t>;
  registry["ds_read_b64_tr_b8"] = read_transposed<uint8_t>;
  registry["ds_bpermute_b32"] = bpermute;
  registry["ds_permute_b32"] = permute;
  registry["ds_swizzle_b32"] = swizzle;
  atomic(registry, "add", "u32", [](uint32_t a, uint32_t b) { return a + b; });
  atomic(registry, "sub", "u32", [](uint32_t a, uint32_t b) { return a - b; });
  atomic(registry, "add", "f32", [](float a, float b) { return a + b; });
  atomic(registry, "min", "i32", [](int32_t a, int32_t b) { return std::min(a, b); });
  atomic(registry, "min", "u32", [](uint32_t a, uint32_t b) { return std::min(a, b); });
  atomic(registry, "max", "i32", [](int32_t a, int32_t b) { return std::max(a, b); });
  atomic(registry, "max", "u32", [](uint32_t a, uint32_t b) { return std::max(a, b); });
  atomic(registry, "and", "b32", [](uint32_t a, uint32_t b) { return a & b; });
  atomic(registry, "or", "b32", [](uint32_t a, uint32_t b) { return a | b; });
  atomic(registry, "xor", "b32", [](uint32_t a, uint32_t b) { return a ^ b; });
}

}  // namespace gfx9
