#include "kernels/sparse/gfx9/instance.h"

MLA_SPARSE_DECODE(f16_fp8, F16, F16, F16, CodeFormat<F16>)
