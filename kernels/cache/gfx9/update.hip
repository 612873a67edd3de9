// update_cache on AMD: a kernel for each pair of the tokens' type and the cache's.
#include "kernels/cache/gfx9/update_rows.h"

namespace mla {

MLA_KERNEL __launch_bounds__(kUpdateThreads) mla_update_cache_claim(UpdateCacheParams p) { claim_slot(p); }

#define MLA_UPDATE(name, Element, stored_name, Stored)                                                        \
  MLA_KERNEL __launch_bounds__(kUpdateThreads) mla_update_cache_##name##_##stored_name(UpdateCacheParams p) { \
    update_rows<Element, Stored>(p);                                                                          \
  }
#define MLA_UPDATES(name, Element)                                                                     \
  MLA_UPDATE(name, Element, name, Element)                                                             \
  MLA_UPDATE(name, Element, e4m3fn, E4M3FN)                                                            \
  MLA_UPDATE(name, Element, e4m3fnuz, E4M3FNUZ)                                                        \
  MLA_KERNEL __launch_bounds__(kUpdateThreads) mla_update_cache_##name##_ds_mla(UpdateCacheParams p) { \
    update_ds_mla_rows<Element>(p);                                                                    \
  }

MLA_UPDATES(f32, float)
MLA_UPDATES(bf16, BF16)
MLA_UPDATES(f16, F16)

}  // namespace mla
