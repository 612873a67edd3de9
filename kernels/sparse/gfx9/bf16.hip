#include "kernels/sparse/gfx9/instance.h"

MLA_SPARSE_DECODE(bf16, BF16, BF16, BF16, PlainFormat)
