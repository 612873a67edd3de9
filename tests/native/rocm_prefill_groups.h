// Groups of the ROCm driver for mla_prefill.
#pragma once

#include "kernels/prefill/gfx950/scratch.h"
#include "kernels/rocm/launch.h"
#include "tests/native/prefill_cases.h"

namespace mla::test {

// With scratch whose old contents are NaN, in an allocation of exactly the size that shapes ask for.
inline Error run_prefill(PrefillParams p) {
  Buffer<uint8_t> scratch(prefill_scratch_bytes(p), 0xFF);
  p.scratch = scratch.data();
  p.scratch_bytes = static_cast<int64_t>(scratch.size());
  return prefill(p, device_with(1));
}

inline void run_prefill_case(const PrefillParams& p, Random&) {
  const Error error = run_prefill(p);
  report.expect(error.empty(), error);
}

inline const PrefillCases kPrefill16Bits{"mla_prefill in bf16 and fp16", run_prefill_case, /*any_scale=*/true};
inline const PrefillCases kPrefillFp8{
    "mla_prefill in e4m3fn", run_prefill_case, /*any_scale=*/true, {{DType::kE4M3FN, DType::kE4M3FN}}};

inline void check_prefill_shapes(const PrefillCases& cases, DType type, std::initializer_list<PrefillShape> shapes) {
  Random random(5);
  double worst = 0;
  for (PrefillShape shape : shapes) {
    shape.type = shape.value_type = type;
    PrefillCase problem(shape, random);
    cases.check(problem, random, &worst);
  }
  char detail[64];
  std::snprintf(detail, sizeof(detail), "worst error of out %.1e", worst);
  report.group(std::string("mla_prefill, long, ") + test::name_of(type), detail);
}

inline PrefillShape prefill_shape(int heads, bool causal, bool merge, std::vector<int> q_lens,
                                  std::vector<int> kv_lens) {
  PrefillShape shape;
  shape.heads = heads;
  shape.causal = causal;
  shape.merge = merge;
  shape.whole_values = merge;
  shape.q_lens = std::move(q_lens);
  shape.kv_lens = std::move(kv_lens);
  return shape;
}

// More requests than a wave has lanes; with 300 of two heads also more pieces than there are persistent workgroups.
inline PrefillShape short_requests(int requests, int heads, bool merge) {
  Random random(4);
  PrefillShape shape = prefill_shape(heads, true, merge, {}, {});
  for (int i = 0; i < requests; ++i) {
    shape.q_lens.push_back(pick(random, 0, 2));
    shape.kv_lens.push_back(pick(random, 0, 140));
  }
  return shape;
}

inline bool on_gfx950() {
  const DeviceInfo* info = nullptr;
  const Error error = device_info(device_with(1), &info);
  report.expect(error.empty(), error);
  return error.empty() && info->architecture == "gfx950";
}

// Ragged batches, and a request of several tiles of queries and several blocks of keys.
inline void test_prefill_16_bits() {
  kPrefill16Bits.run_all(quick ? 8 : 60, 1);
  for (DType type : {DType::kBF16, DType::kF16}) {
    check_prefill_shapes(kPrefill16Bits, type,
                         {prefill_shape(1, true, false, {300}, {310}),
                          prefill_shape(1, false, true, {2, 290}, {70, 80}), short_requests(150, 1, true)});
  }
}

// The same in e4m3fn; and requests long enough to be cut, one of them beside others, with and without a carry.
inline void test_prefill_fp8() {
  kPrefillFp8.run_all(quick ? 8 : 60, 1);
  check_prefill_shapes(kPrefillFp8, DType::kE4M3FN,
                       {prefill_shape(1, true, false, {300}, {310}), prefill_shape(1, true, false, {40}, {2600}),
                        prefill_shape(2, true, true, {3, 60, 7}, {1500, 1300, 20}),
                        prefill_shape(1, false, true, {20, 5}, {1100, 0}), short_requests(300, 2, false)});
}

// Twice over the same inputs.
inline void test_prefill_repeats() {
  Random random(9);
  std::vector<DType> types = {DType::kBF16, DType::kF16};
  if (on_gfx950()) types.push_back(DType::kE4M3FN);
  for (DType type : types) {
    PrefillShape shape = prefill_shape(2, true, false, {40, 0, 200}, {1200, 10, 130});
    shape.type = shape.value_type = type;
    PrefillCase problem(shape, random);
    problem.prepare(random);
    Error error = run_prefill(problem.params());
    const Array out = problem.out;
    const Buffer<float> lse = problem.lse;
    problem.prepare(random);
    if (error.empty()) error = run_prefill(problem.params());
    report.expect(error.empty(), error);
    report.expect(problem.out.bytes == out.bytes && std::memcmp(lse.data(), problem.lse.data(), lse.size() * 4) == 0,
                  "mla_prefill gives other bits when it is called again: " + shape.text());
  }
  report.group("mla_prefill, repeated");
}

inline void test_prefill() {
  test_prefill_16_bits();
  if (on_gfx950()) test_prefill_fp8();
  test_prefill_repeats();
}

inline void test_prefill_refusals() {
  Random random(3);
  PrefillShape shape = prefill_shape(1, true, false, {5}, {5});
  PrefillCase problem(shape, random);
  problem.prepare(random);
  const auto refuses = [](const std::string& words, const PrefillParams& p) {
    const Error error = prefill(p, device_with(1));
    report.expect(error.find(words) != Error::npos, "expected an error with '" + words + "', got '" + error + "'");
  };
  const bool gfx950 = on_gfx950();
  PrefillParams p = problem.params();
  p.variant = 9;
  refuses("variant is 9", p);
  p.variant = gfx950 ? 1 : 2;
  refuses(gfx950 ? "called for gfx942 and runs on gfx950" : "called for gfx950 and runs on gfx942", p);
  p = problem.params();
  p.k_pe = p.k;
  refuses("takes keys as one array", p);
  p = problem.params();
  p.dtype = p.v_dtype = p.out_dtype = DType::kF32;
  refuses("takes bfloat16 and float16, and float8_e4m3fn on gfx950; this call has float32", p);
  p = problem.params();
  p.out_dtype = DType::kF32;
  refuses("writes bfloat16, out is float32", p);
  p = problem.params();
  Scalar<float> scale{2.0f};
  p.v_scale = scale.data();
  refuses("v_scale belong to fp8", p);
  p.q_scale = p.v_scale = nullptr;
  p.k_scale = scale.data();
  refuses("k_scale and v_scale belong to fp8, this mla_prefill has bfloat16", p);
  p = problem.params();
  p.v_dtype = DType::kF16;
  refuses("this call has bfloat16 with values in float16", p);
  p = problem.params();
  p.heads = 1 << 17;
  refuses("65536 heads", p);
  p = problem.params();
  p.dtype = p.v_dtype = DType::kE4M3FN;
  refuses(gfx950 ? "bytes of scratch, and has 0" : "this call has float8_e4m3fn on gfx942", p);
  p.v_tiled = true;
  refuses("values in tiles of float8_e4m3fn", p);
  report.group("mla_prefill, refusals");
}

}  // namespace mla::test
