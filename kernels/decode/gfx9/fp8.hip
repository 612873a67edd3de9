#include "kernels/decode/gfx9/instance.h"

MLA_DECODE(fp8, NativeE4M3, BF16, BF16, CodeFormat<BF16>)
