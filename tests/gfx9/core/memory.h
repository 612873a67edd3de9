// Global memory as a set of allocations, and LDS with a record of who touched each byte since the last barrier.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace gfx9 {

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

struct Traffic {
  uint64_t global_read, global_written, lds_read, lds_written;  // bytes
};

// Addresses are those of this process. An access must lie in one allocation as a whole.
struct Allocation {
  uint64_t base, size;
  uint32_t writable;
};

class Memory {
 public:
  Memory(const Allocation* allocations, int count) : allocations_(allocations, allocations + count) {
    std::sort(allocations_.begin(), allocations_.end(), [](auto& a, auto& b) { return a.base < b.base; });
  }

  char* at(uint64_t address, uint64_t size, bool write, int lane) {
    if (last_ >= allocations_.size() || !contains(allocations_[last_], address, size)) find(address, size, lane);
    if (write && !allocations_[last_].writable)
      throw Fault("out of bounds: lane " + std::to_string(lane) + " writes " + hex(address) + ", which is read-only");
    return reinterpret_cast<char*>(address);
  }

 private:
  static bool contains(const Allocation& a, uint64_t address, uint64_t size) {
    return address >= a.base && address - a.base < a.size && a.size - (address - a.base) >= size;
  }

  void find(uint64_t address, uint64_t size, int lane) {
    auto after = std::upper_bound(allocations_.begin(), allocations_.end(), address,
                                  [](uint64_t value, const Allocation& a) { return value < a.base; });
    if (after != allocations_.begin() && contains(*(after - 1), address, size)) {
      last_ = after - 1 - allocations_.begin();
      return;
    }
    std::string text = "out of bounds: lane " + std::to_string(lane) + " accesses " + std::to_string(size) +
                       " bytes at " + hex(address);
    if (after != allocations_.begin()) {
      const Allocation& before = *(after - 1);
      text += "; the allocation before it is " + hex(before.base) + " with " + std::to_string(before.size) +
              " bytes, which end " + std::to_string(address + size - before.base - before.size) +
              " bytes before the end of the access";
    }
    throw Fault(text);
  }

  std::vector<Allocation> allocations_;
  size_t last_ = 0;
};

// The local data share of a workgroup. A byte that one wave writes and another touches, with no barrier between, is a
// race. Epochs are counted by the barriers that the workgroup has passed.
class Lds {
 public:
  Lds(uint32_t size, bool check_races) : size_(size), check_races_(check_races), bytes_(size + 16, '\xff') {
    if (check_races) {
      written_.assign(size, 0);
      read_.assign(size, 0);
      direct_.assign(size, 0);
    }
  }

  void set_epoch(uint32_t epoch) { epoch_ = epoch; }

  template <uint32_t kSize>
  char* read(int wave, uint32_t offset) {
    check_bounds(offset, kSize);
    if (check_races_) {
      const uint32_t own = stamp(wave), shared = stamp(kSeveral);
      const uint32_t* written = &written_[offset];
      uint32_t* __restrict read = &read_[offset];
      uint32_t conflicts = any_direct(offset, kSize);
      for (uint32_t byte = 0; byte < kSize; ++byte) {
        conflicts |= foreign(written[byte], own);
        read[byte] = foreign(read[byte], own) ? shared : own;
      }
      if (conflicts) [[unlikely]]
        report("reads", wave, offset, kSize, written_, written_);
    }
    return &bytes_[offset];
  }

  template <uint32_t kSize>
  char* write(int wave, uint32_t offset) {
    check_bounds(offset, kSize);
    if (check_races_) {
      const uint32_t own = stamp(wave);
      const uint32_t *written = &written_[offset], *read = &read_[offset];
      uint32_t conflicts = any_direct(offset, kSize);
      for (uint32_t byte = 0; byte < kSize; ++byte) conflicts |= foreign(written[byte], own) | foreign(read[byte], own);
      if (conflicts) [[unlikely]]
        report("writes", wave, offset, kSize, written_, read_);
      std::fill_n(&written_[offset], kSize, own);
    }
    return &bytes_[offset];
  }

  // Atomic operations of several waves on one byte are no race with each other: only bounds are checked.
  char* atomic(uint32_t offset, uint32_t size) {
    check_bounds(offset, size);
    return &bytes_[offset];
  }

  // Loads from memory into LDS have been issued, and have ended.
  void direct_issued(const std::vector<uint32_t>& offsets, uint32_t size) { count_direct(offsets, size, 1); }
  void direct_ended(const std::vector<uint32_t>& offsets, uint32_t size) { count_direct(offsets, size, -1); }

  // A barrier was passed while these accesses of a wave may be outstanding: they count as made after it.
  void restamp(int wave, const std::vector<uint32_t>& offsets, uint32_t size, bool write) {
    if (!check_races_) return;
    for (uint32_t offset : offsets)
      for (uint32_t byte = offset; byte < offset + size; ++byte) {
        uint32_t& last = (write ? written_ : read_)[byte];
        last = stamp(foreign(last, stamp(wave)) ? kSeveral : wave);
      }
  }

 private:
  static constexpr int kSeveral = 0xff;  // waves

  // Epoch and wave of an access in one word, so that the loops over bytes become vector instructions. Epochs begin
  // at 1.
  uint32_t stamp(int wave) const { return epoch_ << 8 | static_cast<uint32_t>(wave); }
  // An access of this epoch that is not by the wave alone whose stamp is `own`.
  static bool foreign(uint32_t last, uint32_t own) { return last != own && (last ^ own) < 0x100; }

  void count_direct(const std::vector<uint32_t>& offsets, uint32_t size, int change) {
    if (!check_races_) return;
    direct_total_ += change;
    for (uint32_t offset : offsets)
      for (uint32_t byte = offset; byte < offset + size; ++byte) direct_[byte] += change;
  }

  // Whether loads to LDS are outstanding on some of the bytes.
  bool any_direct(uint32_t offset, uint32_t size) const {
    return direct_total_ && std::any_of(&direct_[offset], &direct_[offset] + size, [](uint8_t count) { return count; });
  }

  void check_bounds(uint32_t offset, uint32_t size) const {
    if (offset > size_ || size_ - offset < size)
      throw Fault("out of bounds: LDS bytes " + std::to_string(offset) + " to " +
                  std::to_string(static_cast<uint64_t>(offset) + size) + " of " + std::to_string(size_));
  }

  // Tells of the first byte that is touched too early or by several waves.
  [[noreturn]] void report(const char* does, int wave, uint32_t offset, uint32_t size,
                           const std::vector<uint32_t>& written, const std::vector<uint32_t>& read) const {
    uint32_t own = stamp(wave), byte = offset;
    while (byte < offset + size - 1 && !direct_[byte] && !foreign(written[byte], own) && !foreign(read[byte], own))
      ++byte;
    std::string place = "LDS byte " + std::to_string(byte);
    if (direct_[byte])
      throw Fault("missing wait: " + place + " is the result of a load to LDS that no s_waitcnt vmcnt has waited for");
    bool by_write = foreign(written[byte], own);
    int other = (by_write ? written : read)[byte] & 0xff;
    throw Fault("LDS race: wave " + std::to_string(wave) + " " + does + " byte " + std::to_string(byte) + ", " +
                (by_write ? "written" : "read") + " by " +
                (other == kSeveral ? "several waves" : "wave " + std::to_string(other)) +
                " with no barrier between, or with one that it reached before the access had ended");
  }

  uint32_t size_;
  bool check_races_;
  uint32_t epoch_ = 1;
  std::vector<char> bytes_;
  std::vector<uint32_t> written_, read_;  // stamps of the last write, and of the last read or reads
  std::vector<uint8_t> direct_;           // loads to LDS that are outstanding on each byte
  int direct_total_ = 0;
};

}  // namespace gfx9
