// merge_states on AMD: a kernel for each type, and one more for widths that are no multiple of 16 bytes.
#include "kernels/merge/merge_rows.h"

namespace mla {

#define MLA_MERGE(name, Element)                                                   \
  MLA_KERNEL __launch_bounds__(256) mla_merge_states_##name(MergeStatesParams p) { \
    merge_rows<Element, 16 / sizeof(Element)>(p);                                  \
  }                                                                                \
  MLA_KERNEL __launch_bounds__(256) mla_merge_states_##name##_narrow(MergeStatesParams p) { merge_rows<Element, 1>(p); }

MLA_MERGE(f32, float)
MLA_MERGE(bf16, BF16)
MLA_MERGE(f16, F16)

}  // namespace mla
