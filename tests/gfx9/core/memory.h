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
      written_.assign(size, {});
      read_.assign(size, {});
      direct_.assign(size, 0);
    }
  }

  uint32_t size() const { return size_; }
  void set_epoch(uint32_t epoch) { epoch_ = epoch; }

  char* read(int wave, uint32_t offset, uint32_t size) {
    check_bounds(offset, size);
    if (check_races_) {
      for (uint32_t byte = offset; byte < offset + size; ++byte) {
        if (direct_[byte]) missing_wait(byte);
        const Stamp& written = written_[byte];
        if (written.epoch == epoch_ && written.wave != wave) race("reads", wave, byte, "written", written);
        Stamp& read = read_[byte];
        if (read.epoch < epoch_)
          read = {epoch_, static_cast<int16_t>(wave)};
        else if (read.wave != wave)
          read.wave = kSeveral;
      }
    }
    return &bytes_[offset];
  }

  char* write(int wave, uint32_t offset, uint32_t size) {
    check_bounds(offset, size);
    if (check_races_) {
      for (uint32_t byte = offset; byte < offset + size; ++byte) {
        if (direct_[byte]) missing_wait(byte);
        const Stamp &written = written_[byte], &read = read_[byte];
        if (written.epoch == epoch_ && written.wave != wave) race("writes", wave, byte, "written", written);
        if (read.epoch == epoch_ && read.wave != wave) race("writes", wave, byte, "read", read);
        written_[byte] = {epoch_, static_cast<int16_t>(wave)};
      }
    }
    return &bytes_[offset];
  }

  // Atomic operations of several waves on one byte are no race with each other: only bounds are checked.
  char* atomic(uint32_t offset, uint32_t size) {
    check_bounds(offset, size);
    return &bytes_[offset];
  }

  // Loads from memory into LDS have been issued, and have ended.
  void direct_issued(uint32_t offset, uint32_t size) {
    if (check_races_)
      for (uint32_t byte = offset; byte < offset + size; ++byte) ++direct_[byte];
  }
  void direct_ended(const std::vector<uint32_t>& offsets, uint32_t size) {
    if (check_races_)
      for (uint32_t offset : offsets)
        for (uint32_t byte = offset; byte < offset + size; ++byte) --direct_[byte];
  }

  // A barrier was passed while these accesses of a wave may be outstanding: they count as made after it.
  void restamp(int wave, const std::vector<uint32_t>& offsets, uint32_t size, bool write) {
    if (!check_races_) return;
    for (uint32_t offset : offsets)
      for (uint32_t byte = offset; byte < offset + size; ++byte) {
        Stamp& stamp = (write ? written_ : read_)[byte];
        bool shared = stamp.epoch == epoch_ && stamp.wave != wave;
        stamp = {epoch_, shared ? kSeveral : static_cast<int16_t>(wave)};
      }
  }

 private:
  static constexpr int16_t kSeveral = -2;
  struct Stamp {
    uint32_t epoch = 0;  // epochs begin at 1
    int16_t wave = -1;
  };

  void check_bounds(uint32_t offset, uint32_t size) const {
    if (offset > size_ || size_ - offset < size)
      throw Fault("out of bounds: LDS bytes " + std::to_string(offset) + " to " +
                  std::to_string(static_cast<uint64_t>(offset) + size) + " of " + std::to_string(size_));
  }
  [[noreturn]] static void race(const char* does, int wave, uint32_t byte, const char* did, const Stamp& other) {
    throw Fault("LDS race: wave " + std::to_string(wave) + " " + does + " byte " + std::to_string(byte) + ", " + did +
                " by " + (other.wave < 0 ? "several waves" : "wave " + std::to_string(other.wave)) +
                " with no barrier between, or with one that it reached before the access had ended");
  }
  [[noreturn]] static void missing_wait(uint32_t byte) {
    throw Fault("missing wait: LDS byte " + std::to_string(byte) +
                " is the result of a load to LDS that no s_waitcnt vmcnt has waited for");
  }

  uint32_t size_;
  bool check_races_;
  uint32_t epoch_ = 1;
  std::vector<char> bytes_;
  std::vector<Stamp> written_, read_;
  std::vector<uint8_t> direct_;
};

}  // namespace gfx9
