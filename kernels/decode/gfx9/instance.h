// Defines the kernels of one pair of dtypes: mla_decode_<name>_<rows>.
#pragma once

#include "kernels/decode/gfx9/kernel.h"

#define MLA_DECODE_ROWS(name, rows, Query, Element, Out, Format)                                        \
  MLA_KERNEL __launch_bounds__(256) MLA_WAVES_A_SIMD(1) mla_decode_##name##_##rows(mla::DecodeParams) { \
    using namespace mla;                                                                                \
    gfx9::decode_part<Query, Element, Out, gfx9::Shape<rows>, gfx9::Format>();                          \
  }

#define MLA_DECODE(name, Query, Element, Out, Format)    \
  MLA_DECODE_ROWS(name, 32, Query, Element, Out, Format) \
  MLA_DECODE_ROWS(name, 64, Query, Element, Out, Format)
