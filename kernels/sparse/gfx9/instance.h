// Defines the kernels of one pair of dtypes: mla_sparse_decode_<name>_<rows>.
#pragma once

#include "kernels/sparse/gfx9/kernel.h"

#define MLA_SPARSE_DECODE_ROWS(name, rows, Query, Element, Out, Format)                                              \
  MLA_KERNEL __launch_bounds__(256) MLA_WAVES_A_SIMD(1) mla_sparse_decode_##name##_##rows(mla::SparseDecodeParams) { \
    using namespace mla;                                                                                             \
    using Blocks = gfx9::BlocksOf<gfx9::Format, gfx9::ChosenTokens>::Type;                                           \
    gfx9::sparse_piece<Query, Element, Out, gfx9::Shape<rows>, Blocks>();                                            \
  }

#define MLA_SPARSE_DECODE(name, Query, Element, Out, Format)    \
  MLA_SPARSE_DECODE_ROWS(name, 32, Query, Element, Out, Format) \
  MLA_SPARSE_DECODE_ROWS(name, 64, Query, Element, Out, Format)
