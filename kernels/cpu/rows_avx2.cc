#define MLA_ISA avx2
#define MLA_LANES 8
#include "kernels/cpu/row_kernels.h"

const mla::cpu::RowKernels mla::cpu::kAvx2Rows = {mla::avx2::convert_row, mla::avx2::weigh_rows};
