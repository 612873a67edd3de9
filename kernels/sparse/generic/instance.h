#pragma once

#include "kernels/entry.h"

namespace mla {

// The attention of mla_sparse_decode, by the layout of the cache. `shared_limit`: bytes of shared memory that a block
// may have on this device.
Error sparse_generic_bf16(const SparseDecodeParams& params, const Device& device, int32_t shared_limit);
Error sparse_generic_f16(const SparseDecodeParams& params, const Device& device, int32_t shared_limit);
Error sparse_generic_e4m3fn(const SparseDecodeParams& params, const Device& device, int32_t shared_limit);
Error sparse_generic_ds_mla(const SparseDecodeParams& params, const Device& device, int32_t shared_limit);

}  // namespace mla
