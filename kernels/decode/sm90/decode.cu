// Describes the arrays to the copy engine and picks the instance for the plan's tiles.
#include "kernels/decode/sm90/decode.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/tensor_map.h"
#include "kernels/decode/sm90/instance.h"
#include "kernels/decode/sm90/query_maps.h"
#include "kernels/decode/sm90/wide/shape.h"

namespace mla {
namespace sm90 {
namespace {

constexpr int64_t kElementBytes = 2;

// A box has tokens of one page alone, and the chunks that share a slot where that needs no gaps. A coordinate for
// everything that the device may say, so that a page outside the cache is outside the map too.
Error encode_keys(CUtensorMap* map, const DecodeParams& p) {
  constexpr int64_t kTokenBytes = kWidth * kElementBytes;
  const bool whole_blocks = p.page_size >= kBlockTokens, wide_tiles = p.plan.tile_rows == wide::kRows;
  const int64_t page_bytes = p.page_size * kTokenBytes;
  const int32_t tokens = whole_blocks ? kBlockTokens : p.page_size;
  const int32_t chunks = wide_tiles || !whole_blocks ? 1 : kSlotChunks;
  return encode_tensor_map(map, "the cache", p.cache, p.cache_dtype,
                           {{kChunkColumns, 0, kChunkColumns},
                            {p.page_size, kTokenBytes, tokens},
                            {kChunks, kLineBytes, chunks},
                            {p.pages, page_bytes, 1},
                            {p.layers, p.pages * page_bytes, 1}});
}

template <class Element>
Error launch_rows(const DecodeParams& params, const TensorMaps& maps, const Device& device) {
  switch (params.plan.tile_rows) {
    case 8: return launch_instance<Element, 8>(params, maps, device);
    case 16: return launch_instance<Element, 16>(params, maps, device);
    case 24: return launch_instance<Element, 24>(params, maps, device);
    case 32: return launch_instance<Element, 32>(params, maps, device);
    case 40: return launch_instance<Element, 40>(params, maps, device);
    case 48: return launch_instance<Element, 48>(params, maps, device);
    case 64: return launch_instance<Element, 64>(params, maps, device);
    default:
      return "jax_mla: mla_decode's Hopper kernel has no instance for " + std::to_string(params.plan.tile_rows) +
             " rows a tile";
  }
}

}  // namespace
}  // namespace sm90

Error decode_sm90(const DecodeParams& params, const Device& device) {
  sm90::TensorMaps maps;
  Error error = sm90::encode_queries(&maps, "mla_decode", params.plan.tile_rows, params);
  if (error.empty()) error = sm90::encode_keys(&maps.keys, params);
  if (!error.empty()) return error;
  return params.q_dtype == DType::kBF16 ? sm90::launch_rows<__nv_bfloat16>(params, maps, device)
                                        : sm90::launch_rows<__half>(params, maps, device);
}

}  // namespace mla
