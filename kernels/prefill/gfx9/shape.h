// The AMD prefill kernels' geometry: how waves share a tile, and where things lie in LDS. docs/amd_prefill.md explains
// both.
#pragma once

#include <cstdint>

#include "kernels/params.h"
#include "kernels/prefill/request.cuh"

namespace mla::gfx9_prefill {

constexpr int kWaveQueries = 32;  // columns of a product: a lane has one query, and so has the lane 32 further on
constexpr int kBlockKeys = 64;    // keys of a step

// Arrays of 16-bit elements lie in LDS in panels of 64 columns: a line of 128 bytes for each key.
constexpr int kPanelLine = 128;
constexpr int kPanelBytes = kBlockKeys * kPanelLine;
constexpr int kKeyPanels = kHeadDim * 2 / kPanelLine;
constexpr int kValuePanels = kNope * 2 / kPanelLine;
constexpr int kKeyBytes = kKeyPanels * kPanelBytes;
constexpr int kBlockBytes = kKeyBytes + kValuePanels * kPanelBytes;  // 40 KB: keys, then values

// gfx950: two blocks in LDS, two workgroups a compute unit. gfx942 has 64 KB of LDS, for one block: the next one waits
// in registers, and a workgroup has twice the waves instead.
struct Gfx950 {
  static constexpr int kWaves = 4;
  static constexpr int kStages = 2;
};
struct Gfx942 {
  static constexpr int kWaves = 8;
  static constexpr int kStages = 1;
};

template <class Architecture>
constexpr int kTileQueries = Architecture::kWaves * kWaveQueries;

constexpr int32_t kNever = INT32_MAX;  // a key that no row sees

}  // namespace mla::gfx9_prefill
