#include "kernels/decode/cpu/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/vector.h"
#include "kernels/decode/cpu/requests.h"

namespace mla::cpu {
namespace {

using namespace mla::portable;

constexpr float kEmpty = -std::numeric_limits<float>::infinity();
constexpr int64_t kGrainRows = 16;

void write_empty(const DecodeParams& p, int64_t row) {
  p.lse[row] = kEmpty;
  const int64_t bytes = kLatent * bytes_of(p.out_dtype);
  std::memset(static_cast<char*>(p.out) + row * bytes, 0, bytes);
}

// Partials hold normalised outputs, so each weighs exp(lse). One with an lse of -inf saw no key, and is not read.
void merge_partials(const DecodeParams& p, int64_t row, TileSplits splits, int64_t row_in_tile) {
  const auto slot = [&](int32_t i) { return (int64_t{splits.first_partial} + i) * p.plan.tile_rows + row_in_tile; };
  float largest = kEmpty;  // of those that are numbers
  bool empty = true;
  for (int32_t i = 0; i < splits.count; ++i) {
    const float lse = p.partial_lse[slot(i)];
    if (lse != kEmpty) empty = false;
    largest = std::fmax(largest, lse);
  }
  if (empty) return write_empty(p, row);

  alignas(16) float sums[kLatent] = {};
  float total = 0;
  for (int32_t i = 0; i < splits.count; ++i) {
    const float lse = p.partial_lse[slot(i)];
    if (lse == kEmpty) continue;
    const float weight = std::exp(lse - largest);
    const float* const out = p.partial_out + slot(i) * kLatent;
    total += weight;
    for (int64_t c = 0; c < kLatent; c += kLanes) store(sums + c, load(sums + c) + load(out + c) * weight);
  }
  p.lse[row] = largest + std::log(total);
  with_dtype(p.out_dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::kValue;
    char* const out = static_cast<char*>(p.out) + row * kLatent * bytes_of(kType);
    for (int64_t c = 0; c < kLatent; c += kLanes) {
      store_from_float<kType>(out + c * bytes_of(kType), load(sums + c) / total);
    }
  });
}

void reduce_row(const DecodeParams& p, int32_t request, int64_t row_in_request, int64_t row) {
  const int64_t tile = row_in_request / p.plan.tile_rows;
  if (tile >= p.plan.row_tiles) return write_empty(p, row);
  const TileSplits splits = p.plan.tile_splits[int64_t{request} * p.plan.row_tiles + tile];
  if (splits.count == 1) return;
  const bool in_bounds =
      splits.first_partial >= 0 && int64_t{splits.first_partial} + splits.count <= p.plan.max_partials;
  if (splits.count < 1 || !in_bounds) return write_empty(p, row);
  merge_partials(p, row, splits, row_in_request % p.plan.tile_rows);
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
        write_empty(p, row);
      } else {
        reduce_row(p, owner.request, int64_t{owner.query} * p.heads + row % p.heads, row);
      }
    }
  });
}

}  // namespace mla::cpu
