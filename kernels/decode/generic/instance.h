#pragma once

#include "kernels/entry.h"

namespace mla {

// The attention over each part. `shared_limit`: bytes of shared memory that a block may have on this device.
Error decode_generic(const DecodeParams& params, const Device& device, int32_t shared_limit);

// Its instances, by the layout of the cache.
Error decode_generic_bf16(const DecodeParams& params, const Device& device, int32_t shared_limit);
Error decode_generic_f16(const DecodeParams& params, const Device& device, int32_t shared_limit);
Error decode_generic_e4m3fn(const DecodeParams& params, const Device& device, int32_t shared_limit);
Error decode_generic_ds_mla(const DecodeParams& params, const Device& device, int32_t shared_limit);

}  // namespace mla
