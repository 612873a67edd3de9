// What the kernels for gfx942 and gfx950 take, in one place for the capability table and for the choice at launch.
#pragma once

#include <cstdint>

namespace mla::gfx9 {

constexpr int kThreads = 256;  // of a workgroup

// (query, head) rows of a tile.
inline constexpr int32_t kTileSizes[] = {16, 32, 64};

// The instance in which a tile of so many rows runs, with rows at its end that do not exist; 0: none.
inline int32_t instance_rows(int32_t tile_rows) {
  return tile_rows < 1 ? 0 : tile_rows <= 32 ? 32 : tile_rows <= 64 ? 64 : 0;
}

}  // namespace mla::gfx9
