// What the kernels for gfx942 and gfx950 take, in one place for the capability table and for the choice at launch.
#pragma once

#include <cstdint>

namespace mla::gfx9 {

// (query, head) rows of a tile. A tile runs in the next larger instance, whose last rows then do not exist.
inline constexpr int32_t kTileSizes[] = {16, 32, 64};
inline constexpr int32_t kInstanceRows[] = {32, 64};

}  // namespace mla::gfx9
