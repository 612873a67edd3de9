// Where the rows of prefill's arrays lie: keys as their two parts, which are columns of one array, or arrays of their
// own.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"
#include "kernels/params.h"

namespace mla {

// The row of token s and head h starts offset + s * token_stride + h * head_stride elements behind `data`.
struct ArrayPart {
  const void* data;
  int64_t offset, token_stride;
  int64_t head_stride;  // 0: all heads share the row
};

MLA_HOST_DEVICE MLA_FORCE_INLINE ArrayPart nope_part(const PrefillParams& p) {
  return {p.k, 0, p.heads * p.k_stride, p.k_stride};
}

MLA_HOST_DEVICE MLA_FORCE_INLINE ArrayPart rope_part(const PrefillParams& p) {
  if (p.k_pe != nullptr) return {p.k_pe, p.k_pe_offset, p.k_pe_stride, 0};
  return {p.k, kNope, p.heads * p.k_stride, p.k_stride};
}

MLA_HOST_DEVICE MLA_FORCE_INLINE ArrayPart value_part(const PrefillParams& p) {
  return {p.v, p.v_offset, p.heads * p.v_stride, p.v_stride};
}

}  // namespace mla
