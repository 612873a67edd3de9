// pack_kv and pack_kv_fp8 on AMD: a kernel for each type of the input, the rope key and the result.
#include "kernels/pack/gfx9/pack_rows.h"

namespace mla {

#define MLA_PACK(name, Input, rope_name, Rope, output_name, Output)                                             \
  MLA_KERNEL __launch_bounds__(kPackThreads) mla_pack_kv_##name##_##rope_name##_##output_name(PackKvParams p) { \
    pack_rows<Input, Rope, Output>(p);                                                                          \
  }
#define MLA_PACKS_TO(name, Input, output_name, Output)       \
  MLA_PACK(name, Input, name, Input, output_name, Output)    \
  MLA_PACK(name, Input, e4m3fn, E4M3FN, output_name, Output) \
  MLA_PACK(name, Input, e4m3fnuz, E4M3FNUZ, output_name, Output)
#define MLA_PACKS(name, Input)                  \
  MLA_PACKS_TO(name, Input, name, Input)        \
  MLA_PACKS_TO(name, Input, e4m3fn, E4M3FN)     \
  MLA_PACKS_TO(name, Input, e4m3fnuz, E4M3FNUZ) \
  MLA_KERNEL __launch_bounds__(kPackThreads) mla_pack_kv_tiles_##name(PackKvParams p) { tile_values<Input>(p); }

MLA_PACKS(f32, float)
MLA_PACKS(bf16, BF16)
MLA_PACKS(f16, F16)

}  // namespace mla
