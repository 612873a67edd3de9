#define MLA_ISA portable
#define MLA_LANES 4
#include "kernels/cpu/row_kernels.h"

const mla::cpu::RowKernels mla::cpu::kPortableRows = {mla::portable::convert_row, mla::portable::weigh_rows};
