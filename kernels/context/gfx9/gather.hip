// gather_context on AMD: a kernel for each pair of the cache's type and the workspace's.
#include "kernels/context/gfx9/gather_rows.h"

namespace mla {

#define MLA_GATHER(name, Cached, output_name, Output)                                                             \
  MLA_KERNEL __launch_bounds__(kGatherThreads) mla_gather_context_##name##_##output_name(GatherContextParams p) { \
    gather_rows<Cached, Output>(p);                                                                               \
  }
#define MLA_GATHERS(name, Cached)      \
  MLA_GATHER(name, Cached, f32, float) \
  MLA_GATHER(name, Cached, bf16, BF16) \
  MLA_GATHER(name, Cached, f16, F16)

MLA_GATHERS(f32, float)
MLA_GATHERS(bf16, BF16)
MLA_GATHERS(f16, F16)
MLA_GATHERS(e4m3fn, E4M3FN)
MLA_GATHERS(e4m3fnuz, E4M3FNUZ)
MLA_GATHERS(ds_mla, DsMla)

}  // namespace mla
