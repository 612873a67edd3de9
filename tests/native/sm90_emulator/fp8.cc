// The Hopper decode kernel for fp8 caches on a machine without a GPU: its source, compiled for the host over an
// emulated CTA (machine.h), against float64.
//   mla_sm90_fp8_emulator [cases] [seed]
#include "kernels/decode/sm90/fp8/kernel.cuh"
#include "kernels/decode/sm90/fp8/wide/kernel.cuh"
// The kernel's headers come first, so that they find the emulator's vocabulary.
#include "kernels/decode/sm90/fp8/limits.h"
#include "tests/native/sm90_emulator/decode_cases.h"

namespace mla::sm90 {
alignas(1024) unsigned char shared_base[emulator::kSharedBytes];
namespace fp8 {
// The kernel declares it in its own namespace.
extern unsigned char shared_base[] __attribute__((alias("_ZN3mla4sm9011shared_baseE")));
}  // namespace fp8
}  // namespace mla::sm90

namespace mla::test {
namespace {

using emulator::machine;
using emulator::TensorMap;
namespace fp8 = sm90::fp8;

struct Axis {
  int64_t size, stride;
  int32_t box;
};

void describe(CUtensorMap* map, const void* data, std::initializer_list<Axis> axes) {
  TensorMap tensor{};
  tensor.data = static_cast<const char*>(data);
  tensor.element_bytes = 1;
  for (const Axis& axis : axes) {
    tensor.sizes[tensor.rank] = axis.size;
    tensor.strides[tensor.rank] = axis.stride;
    tensor.boxes[tensor.rank++] = axis.box;
  }
  std::memcpy(static_cast<void*>(map), &tensor, sizeof(tensor));
}

// As kernels/decode/sm90/fp8/decode.cu does.
fp8::TensorMaps describe(const DecodeParams& p, int32_t slot_groups) {
  fp8::TensorMaps maps{};
  const int64_t groups = p.layers * p.pages * (p.page_size / 8);
  const int32_t copied = fp8::copied_groups(p.page_size, slot_groups);
  describe(&maps.latent, p.cache, {{128, 0, 128}, {8, 576, 8}, {4, 128, 4}, {groups, 8 * 576, copied}});
  describe(&maps.rope, static_cast<const char*>(p.cache) + 512, {{64, 0, 64}, {8, 576, 8}, {groups, 8 * 576, copied}});
  return maps;
}

// All parts, one after the other.
template <class Shape, class Kernel>
void run_parts(const DecodeParams& p, Kernel kernel) {
  const fp8::TensorMaps maps = describe(p, Shape::kSlotGroups);
  for (int32_t part = 0; part < p.plan.parts; ++part) {
    const bool ended = machine.run(static_cast<uint32_t>(part), Shape::kThreads, [&] { kernel(p, maps); });
    if (!ended) {
      std::fprintf(stderr, "the emulated kernel hangs in part %d\n", part);
      std::abort();
    }
  }
}

template <int kTileRows>
bool run_tiles(const DecodeParams& p) {
  if (p.plan.tile_rows != kTileRows) return false;
  using WideShape = fp8::wide::Shape;
  if constexpr (kTileRows == WideShape::kRows) {
    run_parts<WideShape>(p, fp8::wide_decode_kernel<WideShape>);
  } else {
    run_parts<fp8::Shape<kTileRows>>(p, fp8::decode_kernel<fp8::Shape<kTileRows>>);
  }
  return true;
}

void attend(const DecodeParams& p, Random&) {
  report.expect(fp8::takes(p), "the kernel does not take the call");
  const bool known = run_tiles<8>(p) || run_tiles<16>(p) || run_tiles<24>(p) || run_tiles<32>(p) || run_tiles<40>(p) ||
                     run_tiles<48>(p) || run_tiles<64>(p);
  report.expect(known, "no instance for these tiles");
}

DecodeShape random_case(Random& random) {
  DecodeShape s;
  s.q_type = choose(random, {DType::kBF16, DType::kF16, DType::kE4M3FN});
  s.cache_type = DType::kE4M3FN;
  s.scales = pick(random, 0, 1) == 1;
  s.heads = pick(random, 0, 1) == 0 ? pick(random, 1, 48) : pick(random, 49, 128);
  s.max_q_len = pick(random, 1, s.heads > 48 ? 2 : 4);
  s.tile_rows = fp8::kTileSizes[6];
  for (int i = 6; i >= 0 && fp8::kTileSizes[i] >= s.heads * s.max_q_len; --i) s.tile_rows = fp8::kTileSizes[i];
  s.page_size = choose(random, {8, 16, 24, 32, 40, 48, 64, 64, 96, 128, 192});
  draw_batch(s, random);
  return s;
}

}  // namespace
}  // namespace mla::test

int main(int argc, char** argv) {
  using namespace mla;
  const test::DecodeCases cases{"the Hopper kernel for fp8 caches, emulated", test::random_case, test::attend,
                                [](const test::DecodeShape&) { return true; }};
  return cases.main(argc, argv);
}
