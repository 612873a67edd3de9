// update_cache's fp8_ds_mla rows on a machine without a GPU: the device's source over an emulated warp, bit for bit
// what the CPU's kernel stores, the bits of a NaN aside.
//   mla_ds_mla_emulator [tokens] [seed]
#define MLA_EMULATED ds_mla_rows
#include "tests/native/sm90_emulator/machine.h"
// The kernel's header comes behind it, so that it finds the emulator's vocabulary.
#include "kernels/cache/ds_mla_row.h"
#include "kernels/entry.h"
#include "tests/native/ds_mla.h"

namespace mla::ds_mla_rows {
alignas(1024) unsigned char shared_base[emulator::kSharedBytes];
}

namespace mla::test {
namespace {

using emulator::machine;

// Values of one token: ordinary ones of any size, zeros, the ends of the range, what is not finite.
void fill_token(Array& values, int64_t first, int count, Random& random) {
  const int exponent = pick(random, -40, 40), kind = pick(random, 0, 5);
  for (int64_t i = first; i < first + count; ++i) {
    const double x =
        std::ldexp(static_cast<double>(random()) / 2147483648.0 - 1, values.type == DType::kF16 ? 3 : exponent);
    values.set(i, kind == 0 || pick(random, 0, 9) == 0 ? 0 : x);
    if (kind == 1 && pick(random, 0, 40) == 0) values.set(i, choose(random, {kInfinity, -kInfinity, kNaN}));
  }
}

// Codes and rope values may be any NaN where the other is one.
bool same_row(const uint8_t* a, const uint8_t* b) {
  bool same = std::memcmp(a + kLatent, b + kLatent, kDsMlaRopeByte - kLatent) == 0;
  for (int c = 0; c < kLatent; ++c) same = same && (a[c] == b[c] || ((a[c] & 0x7F) == 0x7F && (b[c] & 0x7F) == 0x7F));
  for (int c = 0; c < kRope; ++c) {
    uint16_t codes[2];
    std::memcpy(&codes[0], a + kDsMlaRopeByte + 2 * c, 2);
    std::memcpy(&codes[1], b + kDsMlaRopeByte + 2 * c, 2);
    same = same && (codes[0] == codes[1] || ((codes[0] & 0x7FFF) > 0x7F80 && (codes[1] & 0x7FFF) > 0x7F80));
  }
  return same;
}

template <class Element>
void check(DType type, int tokens, bool power_of_two, Random& random) {
  Array kv_c(type, int64_t{tokens} * kLatent), k_pe(type, int64_t{tokens} * kRope);
  std::vector<int32_t> slots(tokens);
  for (int t = 0; t < tokens; ++t) {
    slots[t] = t;
    for (int group = 0; group < kLatent / kDsMlaGroup; ++group) {
      fill_token(kv_c, int64_t{t} * kLatent + group * kDsMlaGroup, kDsMlaGroup, random);
    }
    fill_token(k_pe, int64_t{t} * kRope, kRope, random);
  }
  alignas(16) std::vector<uint8_t> expected(int64_t{tokens} * kDsMlaBytes, 0xFF), stored = expected;
  UpdateCacheParams p{};
  p.cache = expected.data();
  p.kv_c = kv_c.data();
  p.k_pe = k_pe.data();
  p.slot_mapping = slots.data();
  p.pages = tokens;
  p.layers = p.page_size = 1;
  p.tokens = tokens;
  p.ds_mla = true;
  p.power_of_two_scales = power_of_two;
  p.input_dtype = type;
  p.cache_dtype = DType::kE4M3FN;
  report.expect(update_cache(p, device_with(1)).empty(), "the CPU's kernel refuses");
  for (int64_t t = 0; t < tokens; ++t) {
    const bool ended = machine.run(0, 32, [&] {
      store_ds_mla(reinterpret_cast<const Element*>(kv_c.data()) + t * kLatent,
                   reinterpret_cast<const Element*>(k_pe.data()) + t * kRope, power_of_two,
                   stored.data() + t * kDsMlaBytes);
    });
    report.expect(ended, "the emulated warp hangs");
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t row = t * kDsMlaBytes;
    report.expect(same_row(stored.data() + row, expected.data() + row), "token " + std::to_string(t) + " differs");
  }
}

}  // namespace
}  // namespace mla::test

int main(int argc, char** argv) {
  using namespace mla;
  const int tokens = argc > 1 ? std::atoi(argv[1]) : 60;
  const auto seed = static_cast<uint32_t>(argc > 2 ? std::atoi(argv[2]) : 1);
  test::Random random(seed);
  emulator::machine.random.seed(seed);
  for (bool power_of_two : {false, true}) {
    test::check<__nv_bfloat16>(DType::kBF16, tokens, power_of_two, random);
    test::check<__half>(DType::kF16, tokens, power_of_two, random);
    test::check<float>(DType::kF32, tokens, power_of_two, random);
  }
  test::report.group("fp8_ds_mla rows of update_cache, emulated");
  return test::report.clean() ? 0 : 1;
}
