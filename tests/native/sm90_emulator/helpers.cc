// update_cache, gather_context and pack_kv on a machine without a GPU: the device's source over emulated warps, bit for
// bit what the CPU's kernels store, the bits of a NaN aside.
//   mla_helpers_emulator [cases] [seed]
#define MLA_EMULATED helper_rows
#include "tests/native/sm90_emulator/machine.h"

using std::max, std::min;

// The kernels' headers come behind it, so that they find the emulator's vocabulary.
#include "kernels/cache/generic/update_rows.cuh"
#include "kernels/context/generic/gather_rows.cuh"
#include "kernels/entry.h"
#include "kernels/pack/generic/pack_rows.cuh"
#include "kernels/pack/generic/pack_tiles.cuh"
#include "tests/native/ds_mla.h"

namespace mla::helper_rows {
alignas(1024) unsigned char shared_base[emulator::kSharedBytes];
}

namespace mla::test {
namespace {

using emulator::machine;

void run_blocks(int64_t blocks, int threads, const std::function<void()>& kernel) {
  machine.blocks = static_cast<uint32_t>(blocks);
  for (int64_t block = 0; block < blocks; ++block) {
    report.expect(machine.run(static_cast<uint32_t>(block), threads, kernel), "an emulated block hangs");
  }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool is_nan(DType type, uint32_t code) { return std::isnan(value_of(type, code)); }

// The first element that differs, or -1.
int64_t first_difference(const Array& a, const Array& b) {
  for (int64_t i = 0; i < a.count(); ++i) {
    if (a.code(i) != b.code(i) && !(is_nan(a.type, a.code(i)) && is_nan(b.type, b.code(i)))) return i;
  }
  return -1;
}

// Ordinary values of any size, zeros of both signs, the ends of the range, what is not finite; in stretches of one
// kind.
void fill_any(Array& values, Random& random) {
  constexpr int64_t kStretch = 128;
  for (int64_t first = 0; first < values.count(); first += kStretch) {
    const int exponent = values.type == DType::kF16 ? 3 : choose(random, {pick(random, -40, 40), 0, 8});
    const int kind = pick(random, 0, 5);
    for (int64_t i = first; i < std::min(first + kStretch, values.count()); ++i) {
      const double x = std::ldexp(static_cast<double>(random()) / 2147483648.0 - 1, exponent);
      values.set(i, kind == 0 || pick(random, 0, 9) == 0 ? choose(random, {0.0, -0.0}) : x);
      if (kind == 1 && pick(random, 0, 40) == 0) values.set(i, choose(random, {kInfinity, -kInfinity, kNaN}));
    }
  }
}

// f(element, its type) for each type of tokens.
template <class F>
void for_inputs(F f) {
  f(__nv_bfloat16(), DType::kBF16);
  f(__half(), DType::kF16);
  f(float(), DType::kF32);
}

// --- update_cache

// Codes and rope values may be any NaN where the other is one.
bool same_ds_mla_row(const uint8_t* a, const uint8_t* b) {
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

template <class Element, class Stored>
void check_update(DType input, DType stored, Random& random) {
  constexpr bool kDsMla = std::is_same_v<Stored, DsMla>;
  const int tokens = choose(random, {1, pick(random, 2, 40), pick(random, 41, 90)}), page_size = pick(random, 1, 9);
  const int layers = pick(random, 1, 2), pages = pick(random, 1, 2 * tokens);
  const int64_t slots = int64_t{pages} * page_size;
  Array kv_c(input, int64_t{tokens} * kLatent), k_pe(input, int64_t{tokens} * kRope);
  fill_any(kv_c, random);
  fill_any(k_pe, random);
  std::vector<int32_t> mapping(tokens);
  const auto distinct = static_cast<int>(choose(random, {int64_t{1}, slots, slots}));
  for (int32_t& slot : mapping) {
    slot = choose(random, {pick(random, 0, distinct - 1), pick(random, 0, distinct - 1), -1, INT32_MIN, INT32_MAX,
                           static_cast<int32_t>(slots)});
  }
  Scalar<int32_t> layer(choose(random, {0, layers - 1, layers - 1, layers, -1}));
  const std::vector<float> scales{0.37f, 2.5f};
  Array expected(stored, layers * slots * (kDsMla ? int64_t{kDsMlaBytes} : kWidth)), actual = expected;
  // What lies in the scratch: anything, or other tokens of the call.
  std::vector<int32_t> owners;
  if (pick(random, 0, 2) > 0) {
    int32_t owner_slots = 1;
    while (owner_slots < 2 * tokens) owner_slots *= 2;
    const int highest = choose(random, {0, tokens - 1, tokens - 1, 1 << 30});
    for (int32_t i = 0; i < 2 * owner_slots; ++i) owners.push_back(pick(random, 0, highest));
  }
  UpdateCacheParams p{};
  p.cache = expected.data();
  p.kv_c = kv_c.data();
  p.k_pe = k_pe.data();
  p.slot_mapping = mapping.data();
  p.layer = layer.data();
  p.k_scale = !kDsMla && is_fp8(stored) && pick(random, 0, 2) ? scales.data() : nullptr;
  p.k_scales = layers;
  p.owners = owners.empty() ? nullptr : owners.data();
  p.pages = pages;
  p.owner_slots = static_cast<int32_t>(owners.size() / 2);
  p.layers = layers;
  p.page_size = page_size;
  p.tokens = tokens;
  p.saturate = !kDsMla && pick(random, 0, 1);
  p.ds_mla = kDsMla;
  p.power_of_two_scales = pick(random, 0, 1);
  p.input_dtype = input;
  p.cache_dtype = stored;
  report.expect_success(update_cache(p, device_with(1)));
  p.cache = actual.data();
  for (int call = 0; call < 2; ++call) {  // the second finds the table as the first left it
    if (p.owner_slots == 0) {
      run_blocks(ceil_div(tokens, kUpdateWarps), kUpdateThreads, [&] { update_few<Element, Stored>(p); });
      continue;
    }
    const int64_t claiming = ceil_div(tokens, kUpdateThreads);
    run_blocks(claiming + ceil_div(tokens, kUpdateWarps), kUpdateThreads,
               [&] { update_many<Element, Stored>(p, static_cast<int32_t>(claiming)); });
    run_blocks(kRestoreBlocks, kUpdateThreads, [&] { restore_last<Element, Stored>(p); });
  }
  const std::string text = std::string("update_cache of ") + name_of(input) + " to " +
                           (kDsMla ? "fp8_ds_mla" : name_of(stored)) + ", " + std::to_string(tokens) + " tokens" +
                           (p.owner_slots > 0 ? ", by table" : "");
  if constexpr (kDsMla) {
    for (int64_t slot = 0; slot < layers * slots; ++slot) {
      const int64_t at = slot * kDsMlaBytes;
      report.expect(same_ds_mla_row(actual.bytes.data() + at, expected.bytes.data() + at),
                    text + ": slot " + std::to_string(slot));
    }
  } else {
    report.expect(first_difference(actual, expected) < 0,
                  text + ": element " + std::to_string(first_difference(actual, expected)));
  }
}

void check_updates(int cases, Random& random) {
  for (int i = 0; i < cases; ++i) {
    for_inputs([&](auto element, DType input) {
      using Element = decltype(element);
      check_update<Element, Element>(input, input, random);
      check_update<Element, E4M3FN>(input, DType::kE4M3FN, random);
      check_update<Element, DsMla>(input, DType::kE4M3FN, random);
    });
  }
  report.group("update_cache, emulated");
}

// --- gather_context

template <class Cached, class Output>
void check_gather(DType cached, DType output, Random& random) {
  constexpr bool kDsMla = std::is_same_v<Cached, DsMla>;
  const int batch = choose(random, {0, 1, pick(random, 2, 5), pick(random, 30, 70)}), page_size = pick(random, 1, 20);
  const int pages = pick(random, 1, 30), max_pages = pick(random, 1, 6), layers = pick(random, 1, 2);
  const int rows = pick(random, 1, 70);
  Array cache(cached, layers * pages * page_size * (kDsMla ? int64_t{kDsMlaBytes} : kWidth));
  if (kDsMla) {
    for (int64_t token = 0; token < int64_t{layers} * pages * page_size; ++token) fill_ds_mla(cache, random, token);
  } else {
    fill_any(cache, random);
  }
  std::vector<int32_t> table(batch * max_pages), starts(batch), cu_kv_lens{pick(random, 0, 1) * pick(random, 0, 9)};
  const auto garbage = [&] { return choose(random, {-1, INT32_MAX, INT32_MIN, 7, 1 << 20}); };
  for (int32_t& page : table) page = pick(random, 0, 9) == 0 ? garbage() : pick(random, 0, pages - 1);
  for (int32_t& start : starts) start = pick(random, 0, 9) == 0 ? garbage() : pick(random, 0, 2 * page_size);
  for (int b = 0; b < batch; ++b) cu_kv_lens.push_back(cu_kv_lens.back() + pick(random, 0, 160 / batch));
  if (pick(random, 0, 3) == 0) cu_kv_lens[pick(random, 0, batch)] = garbage();
  Scalar<int32_t> layer(choose(random, {0, layers - 1, layers - 1, layers, -1}));
  const std::vector<float> scales{0.37f, 2.5f};
  Array latent(output, int64_t{rows} * kLatent), rope(output, int64_t{rows} * kRope), expected_latent = latent,
                                                                                      expected_rope = rope;
  GatherContextParams p{};
  p.cache = cache.data();
  p.layer = layer.data();
  p.k_scale = !kDsMla && is_fp8(cached) && pick(random, 0, 2) ? scales.data() : nullptr;
  p.page_table = table.data();
  p.starts = starts.data();
  p.cu_kv_lens = cu_kv_lens.data();
  p.latent = expected_latent.data();
  p.rope = expected_rope.data();
  p.pages = pages;
  p.rows = rows;
  p.layers = layers;
  p.page_size = page_size;
  p.max_pages = max_pages;
  p.batch = batch;
  p.k_scales = layers;
  p.ds_mla = kDsMla;
  p.cache_dtype = cached;
  p.output_dtype = output;
  report.expect_success(gather_context(p, device_with(1)));
  p.latent = latent.data();
  p.rope = rope.data();
  run_blocks(ceil_div(rows, kGatherRows), kGatherThreads, [&] { gather_row<Cached, Output>(p); });
  const std::string text = std::string("gather_context of ") + (kDsMla ? "fp8_ds_mla" : name_of(cached)) + " to " +
                           name_of(output) + ", " + std::to_string(rows) + " rows, " + std::to_string(batch) +
                           " requests";
  report.expect(first_difference(latent, expected_latent) < 0,
                text + ": latent's element " + std::to_string(first_difference(latent, expected_latent)));
  report.expect(first_difference(rope, expected_rope) < 0,
                text + ": rope key's element " + std::to_string(first_difference(rope, expected_rope)));
}

void check_gathers(int cases, Random& random) {
  for (int i = 0; i < cases; ++i) {
    for_inputs([&](auto element, DType output) {
      using Output = decltype(element);
      for_inputs([&](auto cached, DType type) { check_gather<decltype(cached), Output>(type, output, random); });
      check_gather<E4M3FN, Output>(DType::kE4M3FN, output, random);
      check_gather<E4M3FNUZ, Output>(DType::kE4M3FNUZ, output, random);
      check_gather<DsMla, Output>(DType::kE4M3FN, output, random);
    });
  }
  report.group("gather_context, emulated");
}

// --- pack_kv

template <class Input, class Rope, class Output>
void check_pack(DType input, DType rope_type, DType output, Random& random) {
  constexpr bool kValues = !std::is_same_v<Input, Output>;
  const int heads = choose(random, {1, 3, 8, 12, 24}), tokens = pick(random, 1, 90 / heads + 2);
  const int64_t rows = int64_t{tokens} * heads, width = choose(random, {kRope, kWidth});
  Array up(input, rows * 2 * kNope), k_pe(rope_type, tokens * width);
  fill_any(up, random);
  fill_any(k_pe, random);
  const float scales[] = {0.37f, 0.73f, 3};
  Array k(output, rows * kHeadDim), v(output, kValues ? ceil_div(tokens, kValueTile) * kValueTile * heads * kNope : 0),
      expected_k = k, expected_v = v;
  PackKvParams p{};
  p.kv_up = up.data();
  p.k_pe = k_pe.data();
  p.k_scale = is_fp8(rope_type) && pick(random, 0, 1) ? &scales[0] : nullptr;
  p.packed_k_scale = kValues && pick(random, 0, 1) ? &scales[1] : nullptr;
  p.packed_v_scale = kValues && pick(random, 0, 1) ? &scales[2] : nullptr;
  p.k = expected_k.data();
  p.v = kValues ? expected_v.data() : nullptr;
  p.k_pe_stride = width;
  p.k_pe_offset = width - kRope;
  p.tokens = tokens;
  p.heads = heads;
  p.saturate = kValues && pick(random, 0, 1);
  p.v_tiled = output == DType::kE4M3FN && kValues && pick(random, 0, 2) == 0;
  p.input_dtype = input;
  p.k_pe_dtype = rope_type;
  p.output_dtype = output;
  report.expect_success(pack_kv(p, device_with(1)));
  p.k = k.data();
  p.v = kValues ? v.data() : nullptr;
  if (!p.v_tiled) {
    run_blocks(ceil_div(rows, PackShape<Input, Output>::kBlockRows), kPackThreads,
               [&] { pack_rows<Input, Rope, Output>(p); });
  } else if constexpr (std::is_same_v<Output, E4M3FN>) {
    run_blocks(ceil_div(ceil_div(tokens, kValueTile) * heads, PackTileShape<Input>::kTiles), kPackThreads,
               [&] { pack_tile<Input, Rope>(p, helper_rows::shared_base); });
  }
  const std::string text = std::string("pack_kv of ") + name_of(input) + ", rope " + name_of(rope_type) + ", to " +
                           name_of(output) + ", " + std::to_string(tokens) + " tokens x " + std::to_string(heads) +
                           " heads" + (p.v_tiled ? ", values in tiles" : "");
  report.expect(first_difference(k, expected_k) < 0,
                text + ": element " + std::to_string(first_difference(k, expected_k)) + " of k");
  report.expect(first_difference(v, expected_v) < 0,
                text + ": element " + std::to_string(first_difference(v, expected_v)) + " of v");
}

template <class Input, class Output>
void check_ropes(DType input, DType output, Random& random) {
  check_pack<Input, Input, Output>(input, input, output, random);
  check_pack<Input, E4M3FN, Output>(input, DType::kE4M3FN, output, random);
  check_pack<Input, E4M3FNUZ, Output>(input, DType::kE4M3FNUZ, output, random);
}

void check_packs(int cases, Random& random) {
  for (int i = 0; i < cases; ++i) {
    for_inputs([&](auto element, DType input) {
      using Input = decltype(element);
      check_ropes<Input, Input>(input, input, random);
      check_ropes<Input, E4M3FN>(input, DType::kE4M3FN, random);
      check_ropes<Input, E4M3FNUZ>(input, DType::kE4M3FNUZ, random);
    });
  }
  report.group("pack_kv, emulated");
}

}  // namespace
}  // namespace mla::test

int main(int argc, char** argv) {
  using namespace mla;
  const int cases = argc > 1 ? std::atoi(argv[1]) : 3;
  const auto seed = static_cast<uint32_t>(argc > 2 ? std::atoi(argv[2]) : 1);
  test::Random random(seed);
  emulator::machine.random.seed(seed);
  test::check_updates(cases, random);
  test::check_gathers(cases, random);
  test::check_packs(cases, random);
  return test::report.clean() ? 0 : 1;
}
