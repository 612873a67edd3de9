#include "kernels/decode/gfx9/instance.h"

MLA_DECODE(f16_fp8, F16, F16, F16, CodeFormat<F16>)
