// The functions a native module offers to its handlers. Each platform's module links one definition of each
// (kernels/<operation>/cpu, kernels/<operation>/generic, ...); the handlers' source is the same for all.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/device.h"
#include "kernels/params.h"

namespace mla {

// Empty: success. Otherwise a sentence for the user, with values in it.
using Error = std::string;

Error plan_decode(const PlanDecodeParams& params, const Device& device);
Error decode(const DecodeParams& params, const Device& device);  // the attention over each part, then the reduction
Error sparse_decode(const SparseDecodeParams& params, const Device& device);
Error update_cache(const UpdateCacheParams& params, const Device& device);
Error merge_states(const MergeStatesParams& params, const Device& device);
Error prefill(const PrefillParams& params, const Device& device);
Error gather_context(const GatherContextParams& params, const Device& device);
Error pack_kv(const PackKvParams& params, const Device& device);  // pack_kv and pack_kv_fp8

// Device to device, in order with the kernels.
Error copy(void* target, const void* source, int64_t bytes, const Device& device);

}  // namespace mla
