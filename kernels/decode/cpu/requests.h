// Whose rows are whose, whatever cu_q_lens holds.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/params.h"

namespace mla::cpu {

struct Request {
  int64_t first_token;  // among all T query tokens
  int64_t declared;     // n: queries as cu_q_lens has them, for the causal limit
  int64_t queries;      // those that are served: at most max_q_len, all of them tokens
};

inline Request request_of(const DecodeParams& p, int32_t b) {
  Request request = {int64_t{b} * p.max_q_len, p.max_q_len, 0};
  if (p.cu_q_lens != nullptr) {
    request.first_token = p.cu_q_lens[b];
    request.declared = int64_t{p.cu_q_lens[b + 1]} - p.cu_q_lens[b];
  }
  if (request.first_token >= 0) {
    const int64_t available = p.tokens - request.first_token;
    request.queries = std::max<int64_t>(0, std::min({request.declared, int64_t{p.max_q_len}, available}));
  }
  return request;
}

// The layer that is read, or -1 where there is no such layer.
inline int32_t layer_of(const DecodeParams& p) {
  const int32_t layer = p.layer == nullptr ? 0 : *p.layer;
  return layer < 0 || layer >= p.layers ? -1 : layer;
}

}  // namespace mla::cpu
