// The copy engine's view of the queries, for the Hopper kernels of 16-bit caches.
#pragma once

#include <limits>
#include <string>

#include "kernels/cuda/tensor_map.h"
#include "kernels/decode/sm90/shape.h"
#include "kernels/entry.h"

namespace mla::sm90 {

// Params: of mla_decode or mla_sparse_decode. `operation`: its name.
template <class Params, class Maps>
Error encode_queries(Maps* maps, const char* operation, int32_t tile_rows, const Params& p) {
  constexpr int64_t kElementBytes = 2;
  const int64_t rows = int64_t{p.tokens} * p.heads;
  if (rows > std::numeric_limits<int32_t>::max()) {
    return std::string("jax_mla: rows are 32-bit coordinates, ") + operation + " has " + std::to_string(rows) +
           " (token, head) rows";
  }
  const auto encode = [&](CUtensorMap* map, const char* name, const void* data, int64_t stride, int32_t chunks) {
    return encode_tensor_map(
        map, name, data, p.q_dtype,
        {{kChunkColumns, 0, kChunkColumns}, {rows, stride * kElementBytes, tile_rows}, {chunks, kLineBytes, chunks}});
  };
  const Error error = encode(&maps->q_latent, "q", p.q_latent, p.q_latent_stride, kLatentChunks);
  return !error.empty() ? error : encode(&maps->q_rope, "q's rope part", p.q_rope, p.q_rope_stride, 1);
}

}  // namespace mla::sm90
