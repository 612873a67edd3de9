#include "kernels/decode/gfx9/instance.h"

MLA_DECODE(bf16_fp8, BF16, BF16, BF16, CodeFormat<BF16>)
