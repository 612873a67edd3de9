#include "kernels/cpu/rows.h"

#include "kernels/cpu/isa.h"

namespace mla::cpu {

const RowKernels& row_kernels() {
#if defined(__x86_64__)
  if (runs_here(Isa::kAvx2)) return kAvx2Rows;
#endif
  return kPortableRows;
}

int64_t size_of(DType type) {
  switch (type) {
    case DType::kF32: return 4;
    case DType::kBF16:
    case DType::kF16: return 2;
    default: return 1;
  }
}

}  // namespace mla::cpu
