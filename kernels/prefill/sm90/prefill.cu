// Describes the arrays to the copy engine, and picks the instance.
#include "kernels/prefill/sm90/prefill.h"

#include "kernels/cuda/launch.h"
#include "kernels/cuda/tensor_map.h"
#include "kernels/prefill/parts.h"
#include "kernels/prefill/sm90/grouping.h"
#include "kernels/prefill/sm90/instance.h"

namespace mla {
namespace sm90_prefill {
namespace {

// An array of rows of `chunks` chunks. One without tokens is described as one of a token, never fetched; one that all
// heads share as one of a head.
template <class Element>
Error encode(CUtensorMap* map, const char* name, const ArrayPart& part, DType dtype, int64_t tokens, int32_t chunks,
             int32_t box_tokens, const PrefillParams& p) {
  const void* const data = tokens > 0 ? static_cast<const Element*>(part.data) + part.offset : p.q;
  const bool shared = part.head_stride == 0;
  const int64_t token_bytes = part.token_stride * sizeof(Element), head_bytes = part.head_stride * sizeof(Element);
  return encode_tensor_map(map, name, data, dtype,
                           {{kChunkColumns, 0, kChunkColumns},
                            {tokens > 0 ? tokens : 1, token_bytes, box_tokens},
                            {chunks, kChunkColumns * sizeof(Element), chunks},
                            {shared ? 1 : p.heads, shared ? token_bytes : head_bytes, 1}});
}

template <class Format>
Error encode_arrays(TensorMaps* maps, const PrefillParams& p) {
  using Key = typename Format::Key;
  using Value = typename Format::Value;
  const ArrayPart queries{p.q, 0, int64_t{p.heads} * kHeadDim, kHeadDim};
  Error error = encode<Key>(&maps->queries, "q", queries, p.dtype, p.tokens, kKeyChunks, kGroupQueries, p);
  if (!error.empty()) return error;
  error = encode<Key>(&maps->nope, "k's nope part", nope_part(p), p.dtype, p.stored, kNopeChunks, kBlockKeys, p);
  if (!error.empty()) return error;
  error = encode<Key>(&maps->rope, "k's rope part", rope_part(p), p.dtype, p.stored, kRopeChunks, kBlockKeys, p);
  if (!error.empty()) return error;
  if (Format::kFp8Values) return {};
  return encode<Value>(&maps->values, "v", value_part(p), p.v_dtype, p.stored, kValueChunks, kBlockKeys, p);
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
