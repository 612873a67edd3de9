// Describes the cache to the copy engine and picks the instance for the plan's tiles.
#include "kernels/decode/sm90/fp8/decode.h"

#include <limits>

#include "kernels/cuda/tensor_map.h"
#include "kernels/decode/sm90/fp8/instance.h"
#include "kernels/decode/sm90/fp8/wide/shape.h"

namespace mla {
namespace sm90::fp8 {
namespace {

// Groups of eight tokens are one axis through pages and layers, since a page holds a whole number of them.
Error encode_keys(TensorMaps* maps, const DecodeParams& p) {
  const int64_t groups = p.layers * p.pages * (p.page_size / kGroupTokens);
  if (groups > std::numeric_limits<int32_t>::max()) {
    return "jax_mla: coordinates have 32 bits, mla_decode's cache has " + std::to_string(groups) + " times " +
           std::to_string(kGroupTokens) + " tokens";
  }
  const bool wide_tiles = p.plan.tile_rows == wide::Shape::kRows;
  const int32_t copied = copied_groups(p.page_size, wide_tiles ? wide::Shape::kSlotGroups : kTokenGroups);
  const auto* rope = static_cast<const unsigned char*>(p.cache) + kLatent;
  Error error = encode_tensor_map(&maps->latent, "the cache", p.cache, p.cache_dtype,
                                  {{kLineBytes, 0, kLineBytes},
                                   {kGroupTokens, kWidth, kGroupTokens},
                                   {kLatentChunks, kLineBytes, kLatentChunks},
                                   {groups, kGroupTokens * kWidth, copied}});
  if (!error.empty()) return error;
  return encode_tensor_map(
      &maps->rope, "the cache's rope part", rope, p.cache_dtype,
      {{kRope, 0, kRope}, {kGroupTokens, kWidth, kGroupTokens}, {groups, kGroupTokens * kWidth, copied}});
}

}  // namespace
}  // namespace sm90::fp8

Error decode_sm90_fp8(const DecodeParams& params, const Device& device) {
  namespace fp8 = sm90::fp8;
  fp8::TensorMaps maps;
  const Error error = fp8::encode_keys(&maps, params);
  if (!error.empty()) return error;
  switch (params.plan.tile_rows) {
    case 8: return fp8::launch_instance<8>(params, maps, device);
    case 16: return fp8::launch_instance<16>(params, maps, device);
    case 24: return fp8::launch_instance<24>(params, maps, device);
    case 32: return fp8::launch_instance<32>(params, maps, device);
    case 40: return fp8::launch_instance<40>(params, maps, device);
    case 48: return fp8::launch_instance<48>(params, maps, device);
    case 64: return fp8::launch_instance<64>(params, maps, device);
    default:
      return "jax_mla: mla_decode's Hopper kernel for fp8 caches has no instance for " +
             std::to_string(params.plan.tile_rows) + " rows a tile";
  }
}

}  // namespace mla
