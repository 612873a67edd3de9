#include "kernels/sparse/gfx9/instance.h"

MLA_SPARSE_DECODE(bf16_ds_mla, BF16, BF16, BF16, DsMlaFormat)
