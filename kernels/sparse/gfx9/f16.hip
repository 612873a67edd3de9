#include "kernels/sparse/gfx9/instance.h"

MLA_SPARSE_DECODE(f16, F16, F16, F16, PlainFormat)
