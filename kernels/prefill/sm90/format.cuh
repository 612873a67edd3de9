// The element types of an instance, and what follows from them for shared memory.
#pragma once

#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/prefill/sm90/shape.h"

namespace mla::sm90_prefill {

// Arrays lie in chunks of 64 columns, a line for each token: of 128 bytes, or of 64 in e4m3.
template <class KeyElement, class ValueElement>
struct Format {
  using Key = KeyElement;  // and the queries'
  using Value = ValueElement;
  using Result = std::conditional_t<sizeof(Key) == 1, __nv_bfloat16, Key>;

  // Products take 32 bytes of a line at once, of 16-bit elements and of e4m3.
  static constexpr int kKeyLine = kChunkColumns * sizeof(Key);
  static constexpr int kLineSteps = kKeyLine / 32;
  static constexpr int kKeySteps = kKeyChunks * kLineSteps;
  static constexpr int kWeightSteps = kBlockKeys * sizeof(Value) / 32;

  static constexpr int kQueryChunkBytes = kGroupQueries * kKeyLine;
  static constexpr int kQueryBytes = kKeyChunks * kQueryChunkBytes;  // of a group
  static constexpr int kKeyChunkBytes = kBlockKeys * kKeyLine;
  static constexpr int kKeyBytes = kKeyChunks * kKeyChunkBytes;
  static constexpr int kValueChunkBytes = kBlockKeys * kChunkColumns * sizeof(Value);
  static constexpr int kValueBytes = kValueChunks * kValueChunkBytes;

  static constexpr int kStages = sizeof(Key) == 1 ? 3 : 2;  // blocks of keys, and of values, in shared memory
  static_assert(kStages <= kMostStages);

  // Offsets from the start of shared memory.
  static constexpr int kKeysAt = 0;
  static constexpr int kValuesAt = kKeysAt + kStages * kKeyBytes;
  static constexpr int kQueriesAt = kValuesAt + kStages * kValueBytes;
  static constexpr int kControlAt = kQueriesAt + kGroups * kQueryBytes;
  static constexpr size_t kSharedBytes = kControlAt + sizeof(Control);
  static_assert(kSharedBytes <= 227 * 1024);
};

}  // namespace mla::sm90_prefill
