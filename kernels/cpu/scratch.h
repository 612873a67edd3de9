// Scratch that a thread keeps from call to call: fresh memory would be paid for page by page.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace mla::cpu {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }

  // Aligned to 64 bytes; null when there is no memory.
  void* get(int64_t bytes) {
    if (bytes > bytes_) {
      std::free(memory_);
      memory_ = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
      bytes_ = memory_ == nullptr ? 0 : bytes;
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace mla::cpu
