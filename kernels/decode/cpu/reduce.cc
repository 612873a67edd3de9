#include "kernels/decode/cpu/reduce.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/rows.h"
#include "kernels/decode/cpu/partials.h"
#include "kernels/decode/cpu/requests.h"

namespace mla::cpu {
namespace {

constexpr int64_t kGrainRows = 16;

OutputRow output_row(const DecodeParams& p, int64_t row) {
  return {static_cast<char*>(p.out) + row * kLatent * size_of(p.out_dtype), p.lse + row, p.out_dtype};
}

void reduce_row(const DecodeParams& p, int32_t request, int64_t row_in_request, int64_t row) {
  const int64_t tile = row_in_request / p.plan.tile_rows;
  if (tile >= p.plan.row_tiles) return write_empty(output_row(p, row));
  const TileSplits splits = p.plan.tile_splits[int64_t{request} * p.plan.row_tiles + tile];
  if (splits.count == 1) return;
  const bool in_bounds =
      splits.first_partial >= 0 && int64_t{splits.first_partial} + splits.count <= p.plan.max_partials;
  if (splits.count < 1 || !in_bounds) return write_empty(output_row(p, row));
  const int64_t first = int64_t{splits.first_partial} * p.plan.tile_rows + row_in_request % p.plan.tile_rows;
  const Partials partials = {p.partial_out + first * kLatent, p.partial_lse + first, p.plan.tile_rows, splits.count};
  merge_partials(partials, /*sink=*/nullptr, output_row(p, row));
}

}  // namespace

void reduce(const DecodeParams& p, const Device& device) {
  struct Owner {
    int32_t request = -1;
    int32_t query = 0;
  };
  std::vector<Owner> owners(p.tokens);
  if (layer_of(p) >= 0) {
    for (int32_t b = 0; b < p.batch; ++b) {
      const Request request = request_of(p, b);
      for (int64_t i = 0; i < request.queries; ++i) owners[request.first_token + i] = {b, static_cast<int32_t>(i)};
    }
  }
  // Without a split tile there is next to nothing to do.
  const int64_t tiles = int64_t{p.batch} * p.plan.row_tiles;
  const bool split =
      std::any_of(p.plan.tile_splits, p.plan.tile_splits + tiles, [](TileSplits s) { return s.count > 1; });
  const int64_t rows = int64_t{p.tokens} * p.heads;
  parallel_ranges(device, rows, split ? kGrainRows : rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Owner owner = owners[row / p.heads];
      if (owner.request < 0) {
        write_empty(output_row(p, row));
      } else {
        reduce_row(p, owner.request, int64_t{owner.query} * p.heads + row % p.heads, row);
      }
    }
  });
}

}  // namespace mla::cpu
