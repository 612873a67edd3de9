#pragma once

#include <cuda.h>

namespace mla::sparse_sm90 {

// The copy engine's view of the queries, innermost axis first.
struct QueryMaps {
  CUtensorMap q_latent;  // [column in chunk, row, chunk]
  CUtensorMap q_rope;    // [column in chunk, row, 1]
};

}  // namespace mla::sparse_sm90
