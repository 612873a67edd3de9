// A handler that counts its calls. Replays of a captured graph call no handler, so a count that stands still while
// results change is how the tests see that a step is replayed.
#pragma once

#include <atomic>
#include <cstdint>

#include "xla/ffi/api/c_api.h"

namespace mla {

// Over all devices of the process.
template <XLA_FFI_Handler* handler>
std::atomic<int64_t> calls_of{0};

// At registration XLA asks a handler for its version and traits through the same entry, by an extension.
inline bool asks_for_metadata(const XLA_FFI_CallFrame* frame) {
  for (const XLA_FFI_Extension_Base* e = frame->extension_start; e != nullptr; e = e->next) {
    if (e->type == XLA_FFI_Extension_Metadata) return true;
  }
  return false;
}

template <XLA_FFI_Handler* handler>
XLA_FFI_Error* counted(XLA_FFI_CallFrame* frame) {
  if (!asks_for_metadata(frame)) calls_of<handler>.fetch_add(1, std::memory_order_relaxed);
  return handler(frame);
}

}  // namespace mla
