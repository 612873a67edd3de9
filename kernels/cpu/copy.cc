#include <cstring>

#include "kernels/cpu/parallel.h"
#include "kernels/entry.h"

namespace mla {

Error copy(void* target, const void* source, int64_t bytes, const Device& device) {
  cpu::parallel_ranges(device, bytes, 1 << 20, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(target) + begin, static_cast<const char*>(source) + begin, end - begin);
  });
  return {};
}

}  // namespace mla
