#include "kernels/decode/gfx9/instance.h"

MLA_DECODE(bf16_ds_mla, BF16, BF16, BF16, DsMlaFormat)
