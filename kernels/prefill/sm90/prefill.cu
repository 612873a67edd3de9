// Describes the arrays to the copy engine, and picks the instance.
#include "kernels/prefill/sm90/prefill.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/tensor_map.h"
#include "kernels/prefill/sm90/grouping.h"
#include "kernels/prefill/sm90/instance.h"

namespace mla {
namespace sm90_prefill {
namespace {

constexpr int64_t kElementBytes = 2;

// `stride`: elements from a head to the next. An array without tokens is described as one of a token, never fetched.
Error encode(CUtensorMap* map, const char* name, const void* data, int64_t tokens, int64_t stride, int32_t chunks,
             int32_t box_tokens, const PrefillParams& p) {
  const int64_t head_bytes = stride * kElementBytes;
  return encode_tensor_map(map, name, tokens > 0 ? data : p.q, p.dtype,
                           {{kChunkColumns, 0, kChunkColumns},
                            {tokens > 0 ? tokens : 1, p.heads * head_bytes, box_tokens},
                            {chunks, kLineBytes, chunks},
                            {p.heads, head_bytes, 1}});
}

template <class Element>
Error launch_element(const PrefillParams& p, const TensorMaps& maps, const Device& device) {
  int32_t multiprocessors = 0;
  const Error error = device_attribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (!error.empty()) return error;
  const int32_t ctas = cta_count(p, multiprocessors);
  const Schedule schedule = schedule_of(p, ctas);
  return p.key_mask != nullptr ? launch_instance<Element, true>(p, maps, schedule, ctas, device)
                               : launch_instance<Element, false>(p, maps, schedule, ctas, device);
}

}  // namespace
}  // namespace sm90_prefill

Error prefill_sm90(const PrefillParams& params, const Device& device) {
  using namespace sm90_prefill;
  TensorMaps maps;
  const auto* values = static_cast<const char*>(params.v) + params.v_offset * kElementBytes;
  Error error = encode(&maps.queries, "q", params.q, params.tokens, kHeadDim, kKeyChunks, kGroupQueries, params);
  if (error.empty()) error = encode(&maps.keys, "k", params.k, params.stored, kHeadDim, kKeyChunks, kBlockKeys, params);
  if (error.empty()) {
    error = encode(&maps.values, "v", values, params.stored, params.v_stride, kValueChunks, kBlockKeys, params);
  }
  if (!error.empty()) return error;
  return params.dtype == DType::kBF16 ? launch_element<__nv_bfloat16>(params, maps, device)
                                      : launch_element<__half>(params, maps, device);
}

}  // namespace mla
