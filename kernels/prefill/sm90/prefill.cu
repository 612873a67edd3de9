// Describes the arrays to the copy engine, and picks the instance.
#include "kernels/prefill/sm90/prefill.h"

#include "kernels/cuda/launch.h"
#include "kernels/cuda/tensor_map.h"
#include "kernels/prefill/sm90/grouping.h"
#include "kernels/prefill/sm90/instance.h"

namespace mla {
namespace sm90_prefill {
namespace {

// `stride`: elements from a head to the next. An array without tokens is described as one of a token, never fetched.
template <class Element>
Error encode(CUtensorMap* map, const char* name, const void* data, DType dtype, int64_t tokens, int64_t stride,
             int32_t chunks, int32_t box_tokens, const PrefillParams& p) {
  const int64_t head_bytes = stride * sizeof(Element);
  return encode_tensor_map(map, name, tokens > 0 ? data : p.q, dtype,
                           {{kChunkColumns, 0, kChunkColumns},
                            {tokens > 0 ? tokens : 1, p.heads * head_bytes, box_tokens},
                            {chunks, kChunkColumns * sizeof(Element), chunks},
                            {p.heads, head_bytes, 1}});
}

template <class Format>
Error encode_arrays(TensorMaps* maps, const PrefillParams& p) {
  using Key = typename Format::Key;
  using Value = typename Format::Value;
  Error error = encode<Key>(&maps->queries, "q", p.q, p.dtype, p.tokens, kHeadDim, kKeyChunks, kGroupQueries, p);
  if (!error.empty()) return error;
  error = encode<Key>(&maps->keys, "k", p.k, p.dtype, p.stored, kHeadDim, kKeyChunks, kBlockKeys, p);
  if (!error.empty()) return error;
  if (Format::kFp8Values) return {};
  return encode<Value>(&maps->values, "v", static_cast<const Value*>(p.v) + p.v_offset, p.v_dtype, p.stored, p.v_stride,
                       kValueChunks, kBlockKeys, p);
}

template <class Format>
Error launch_format(const PrefillParams& p, const Device& device) {
  TensorMaps maps;
  Error error = encode_arrays<Format>(&maps, p);
  if (!error.empty()) return error;
  int32_t multiprocessors = 0;
  error = device_attribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (!error.empty()) return error;
  const int32_t ctas = cta_count(p, multiprocessors);
  const Schedule schedule = schedule_of(p, ctas);
  return p.key_mask != nullptr ? launch_instance<Format, true>(p, maps, schedule, ctas, device)
                               : launch_instance<Format, false>(p, maps, schedule, ctas, device);
}

}  // namespace
}  // namespace sm90_prefill

Error prefill_sm90(const PrefillParams& params, const Device& device) {
  using namespace sm90_prefill;
  switch (params.dtype) {
    case DType::kBF16: return launch_format<Format<__nv_bfloat16, __nv_bfloat16>>(params, device);
    case DType::kF16: return launch_format<Format<__half, __half>>(params, device);
    default: break;
  }
  return params.v_tiled ? launch_format<Format<E4M3FN, E4M3FN>>(params, device)
                        : launch_format<Format<E4M3FN, __nv_bfloat16>>(params, device);
}

}  // namespace mla
