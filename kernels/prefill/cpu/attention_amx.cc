// The bf16 arithmetic with both products in AMX tiles.
#define MLA_ISA amx
#define MLA_LANES 16
#define MLA_BLOCK_KEYS 256
#include "kernels/cpu/amx_tiles.h"
#include "kernels/prefill/cpu/attention_bf16.h"

namespace mla::amx::prefill {
namespace {

// Tiles 0 to 3: sums of two tiles of a by one or two of rows; 4 and 5: a; 6 and 7: b.
template <bool kTwo, bool kAdd>
void amx_product_tile(const PairUnit* a, int64_t a_stride, const PairUnit* b, int64_t units, float* sums) {
  constexpr int64_t kBytes = kStride * sizeof(float);
  float* const more = sums + kTileLines * kStride;
  if (kAdd) {
    load_tile<0>(sums, kBytes);
    load_tile<1>(more, kBytes);
    if (kTwo) {
      load_tile<2>(sums + kTileUnits, kBytes);
      load_tile<3>(more + kTileUnits, kBytes);
    }
  } else {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
  }
  const int64_t a_bytes = a_stride * sizeof(PairUnit);
  for (int64_t unit = 0; unit < units; unit += kTileUnits, b += kTileUnits * kStride) {
    load_tile<4>(a + unit, a_bytes);
    load_tile<6>(b, kBytes);
    multiply_tiles<0, 4, 6>();
    load_tile<5>(a + kTileLines * a_stride + unit, a_bytes);
    multiply_tiles<1, 5, 6>();
    if (kTwo) {
      load_tile<7>(b + kTileUnits, kBytes);
      multiply_tiles<2, 4, 7>();
      multiply_tiles<3, 5, 7>();
    }
  }
  store_tile<0>(sums, kBytes);
  store_tile<1>(more, kBytes);
  if (kTwo) {
    store_tile<2>(sums + kTileUnits, kBytes);
    store_tile<3>(more + kTileUnits, kBytes);
  }
}

// As `product`; m is a multiple of 32, units one of 16.
template <bool kAdd>
void amx_product(const PairUnit* a, int64_t a_stride, int64_t m, const PairUnit* b, int64_t units, int32_t vectors,
                 float* sums) {
  for (int32_t v = 0; v < vectors; v += 2) {
    for (int64_t i = 0; i < m; i += 2 * kTileLines) {
      const auto multiply = v + 2 <= vectors ? amx_product_tile<true, kAdd> : amx_product_tile<false, kAdd>;
      multiply(a + i * a_stride, a_stride, b + v * kLanes, units, sums + i * kStride + v * kLanes);
    }
  }
}

struct AmxTiles : BFloat16Pairs {
  template <typename Tile, typename W>
  static void scores(const Tile& tile, const W& w, int32_t keys, int32_t vectors) {
    amx_product<false>(w.keys, W::kKeyUnits, keys, tile.queries, W::kKeyUnits, vectors, w.scores);
  }

  template <typename Tile, typename W>
  static void accumulate(const Tile& tile, const W& w, int32_t keys, int32_t vectors) {
    amx_product<true>(w.values, W::kValueStride, kNope, w.probabilities, keys / kPack, vectors, tile.sums);
  }
};

void run(const PrefillItem& item, void* scratch) {
  configure_tiles();
  attend<AmxTiles>(item, scratch);
  release_tiles();
}

}  // namespace
}  // namespace mla::amx::prefill

const mla::cpu::PrefillKernel mla::cpu::kAmxPrefill = {mla::amx::prefill::scratch_bytes<mla::amx::prefill::AmxTiles>,
                                                       mla::amx::prefill::run};
