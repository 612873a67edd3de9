// Loops over ranges on the caller's threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/device.h"

namespace mla::cpu {

// Calls f(begin, end) over pieces of [0, n) of at least `grain`, a few for each thread; alone when one piece will do.
template <typename F>
void parallel_ranges(const Device& device, int64_t n, int64_t grain, const F& f) {
  const int64_t pieces = std::min<int64_t>(n / std::max<int64_t>(grain, 1), int64_t{4} * std::max(device.threads, 1));
  if (pieces <= 1) return f(int64_t{0}, n);
  device.parallel_for(pieces, [&](int64_t i) { f(n * i / pieces, n * (i + 1) / pieces); });
}

}  // namespace mla::cpu
