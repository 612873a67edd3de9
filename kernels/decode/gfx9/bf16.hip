#include "kernels/decode/gfx9/instance.h"

MLA_DECODE(bf16, BF16, BF16, BF16, PlainFormat)
