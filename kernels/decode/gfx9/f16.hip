#include "kernels/decode/gfx9/instance.h"

MLA_DECODE(f16, F16, F16, F16, PlainFormat)
