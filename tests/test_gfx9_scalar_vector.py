"""Scalar and vector arithmetic, one instruction at a time, against Python's integers and NumPy's floats."""

import ml_dtypes
import numpy as np
import pytest
from gfx9 import ARCHITECTURES, assembly, marks

pytestmark = marks.needs_llvm
RNG = np.random.default_rng(0)
MASK = 0xFFFFFFFF
# Corner values and random ones, each a row of 64 words; the third has small shifts too.
CORNERS = [0, 1, MASK, 0x80000000, 0x7FFFFFFF, 0xFFFF, 0x10000, 31, 32, 0xFF00FF00]
WORDS = RNG.integers(0, 2**32, (3, 64), dtype=np.uint32)
for i, row in enumerate(WORDS):
    row[: len(CORNERS)] = np.roll(CORNERS, 3 * i)
WORDS[2, 20:] &= 63


def signed(x: int, bits: int = 32) -> int:
    return (int(x) & (1 << bits) - 1 ^ 1 << bits - 1) - (1 << bits - 1)


def bits_of(x: int, first: int, width: int) -> int:
    return int(x) >> (first & 31) & (1 << (width & 31)) - 1


def byte_of(pair: int, choice: int) -> int:
    if choice < 8:
        return pair >> 8 * choice & 0xFF
    if choice < 12:
        return 0xFF * (pair >> 16 * (choice - 8) + 15 & 1)
    return 0 if choice == 12 else 0xFF


INTEGERS = {
    "v_add_u32_e32 v50, v1, v2": lambda a, b, c: a + b,
    "v_sub_u32_e32 v50, v1, v2": lambda a, b, c: a - b,
    "v_subrev_u32_e32 v50, v1, v2": lambda a, b, c: b - a,
    "v_mul_lo_u32 v50, v1, v2": lambda a, b, c: a * b,
    "v_mul_hi_u32 v50, v1, v2": lambda a, b, c: a * b >> 32,
    "v_mul_hi_i32 v50, v1, v2": lambda a, b, c: signed(a) * signed(b) >> 32,
    "v_mul_u32_u24_e32 v50, v1, v2": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_mul_i32_i24_e32 v50, v1, v2": lambda a, b, c: signed(a, 24) * signed(b, 24),
    "v_mul_hi_u32_u24_e32 v50, v1, v2": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32,
    "v_mul_hi_i32_i24_e32 v50, v1, v2": lambda a, b, c: signed(a, 24) * signed(b, 24) >> 32,
    "v_mad_u32_u24 v50, v1, v2, v3": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_mad_i32_i24 v50, v1, v2, v3": lambda a, b, c: signed(a, 24) * signed(b, 24) + c,
    "v_add3_u32 v50, v1, v2, v3": lambda a, b, c: a + b + c,
    "v_lshl_add_u32 v50, v1, v2, v3": lambda a, b, c: (a << (b & 31)) + c,
    "v_add_lshl_u32 v50, v1, v2, v3": lambda a, b, c: (a + b) << (c & 31),
    "v_lshl_or_b32 v50, v1, v2, v3": lambda a, b, c: a << (b & 31) | c,
    "v_and_or_b32 v50, v1, v2, v3": lambda a, b, c: a & b | c,
    "v_or3_b32 v50, v1, v2, v3": lambda a, b, c: a | b | c,
    "v_xad_u32 v50, v1, v2, v3": lambda a, b, c: (a ^ b) + c,
    "v_and_b32_e32 v50, 0xff00ff, v2": lambda a, b, c: b & 0xFF00FF,
    "v_or_b32_e32 v50, -7, v2": lambda a, b, c: b | signed(-7) & MASK,
    "v_xor_b32_e32 v50, v1, v2": lambda a, b, c: a ^ b,
    "v_xnor_b32_e32 v50, v1, v2": lambda a, b, c: ~(a ^ b),
    "v_not_b32_e32 v50, v1": lambda a, b, c: ~a,
    "v_lshlrev_b32_e32 v50, v2, v1": lambda a, b, c: a << (b & 31),
    "v_lshrrev_b32_e32 v50, v2, v1": lambda a, b, c: a >> (b & 31),
    "v_ashrrev_i32_e32 v50, v2, v1": lambda a, b, c: signed(a) >> (b & 31),
    "v_bfe_u32 v50, v1, v2, v3": lambda a, b, c: bits_of(a, b, c),
    "v_bfe_i32 v50, v1, v2, v3": lambda a, b, c: signed(bits_of(signed(a), b, c), c & 31) if c & 31 else 0,
    "v_bfi_b32 v50, v1, v2, v3": lambda a, b, c: a & b | ~a & c,
    "v_bfm_b32 v50, v1, v2": lambda a, b, c: (1 << (a & 31)) - 1 << (b & 31),
    "v_bfrev_b32_e32 v50, v1": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "v_bcnt_u32_b32 v50, v1, v2": lambda a, b, c: a.bit_count() + b,
    "v_ffbh_u32_e32 v50, v1": lambda a, b, c: 32 - a.bit_length() if a else -1,
    "v_ffbl_b32_e32 v50, v1": lambda a, b, c: (a & -a).bit_length() - 1,
    "v_alignbit_b32 v50, v1, v2, v3": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "v_alignbyte_b32 v50, v1, v2, v3": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3),
    "v_perm_b32 v50, v1, v2, v3": lambda a, b, c: sum(
        byte_of(a << 32 | b, c >> 8 * i & 0xFF) << 8 * i for i in range(4)
    ),
    "v_max_u32_e32 v50, v1, v2": lambda a, b, c: max(a, b),
    "v_min_i32_e32 v50, v1, v2": lambda a, b, c: min(a, b, key=signed),
    "v_max3_i32 v50, v1, v2, v3": lambda a, b, c: max(a, b, c, key=signed),
    "v_med3_u32 v50, v1, v2, v3": lambda a, b, c: sorted((a, b, c))[1],
    "v_cvt_f32_ubyte2_e32 v50, v1\nv_cvt_u32_f32_e32 v50, v50": lambda a, b, c: a >> 16 & 0xFF,
    "v_add_u16_e32 v50, v1, v2": lambda a, b, c: a + b & 0xFFFF,
    "v_add_u32_sdwa v50, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1 src1_sel:WORD_1": (
        lambda a, b, c: (a >> 8 & 0xFF) + (b >> 16)
    ),
    "v_add_u32_sdwa v50, sext(v1), v2 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:WORD_0 src1_sel:DWORD": (
        lambda a, b, c: (signed(a, 16) + b & 0xFFFF) << 16
    ),
    "v_mov_b32_e32 v50, v3\nv_mov_b32_sdwa v50, v1 dst_sel:BYTE_2 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_3": (
        lambda a, b, c: c & 0xFF00FFFF | a >> 24 << 16
    ),
    "v_pk_add_u16 v50, v1, v2": lambda a, b, c: (a + b & 0xFFFF) | ((a >> 16) + (b >> 16) & 0xFFFF) << 16,
    "v_pk_mul_lo_u16 v50, v1, v2 op_sel:[1,0] op_sel_hi:[0,1]": (
        lambda a, b, c: ((a >> 16) * (b & 0xFFFF) & 0xFFFF) | ((a & 0xFFFF) * (b >> 16) & 0xFFFF) << 16
    ),
    "v_cmp_lt_i32_e32 vcc, v1, v2\nv_cndmask_b32_e32 v50, v1, v3, vcc": (
        lambda a, b, c: c if signed(a) < signed(b) else a
    ),
    "v_cmp_ge_u32_e64 s[20:21], v1, v2\nv_cndmask_b32_e64 v50, v1, v3, s[20:21]": lambda a, b, c: c if a >= b else a,
    "v_add_co_u32_e32 v50, vcc, v1, v2\nv_addc_co_u32_e32 v50, vcc, v3, v3, vcc": (
        lambda a, b, c: 2 * c + (a + b >> 32)
    ),
    "v_sub_co_u32_e32 v50, vcc, v1, v2\nv_subb_co_u32_e32 v50, vcc, v3, v2, vcc": lambda a, b, c: c - b - (b > a),
    "v_mad_u64_u32 v[50:51], s[20:21], v1, v2, v[2:3]\nv_mov_b32_e32 v50, v51": (
        lambda a, b, c: a * b + (c << 32 | b) >> 32
    ),
    "v_mad_i64_i32 v[50:51], s[20:21], v1, v2, v[2:3]\nv_mov_b32_e32 v50, v51": (
        lambda a, b, c: signed(a) * signed(b) + (c << 32 | b) >> 32
    ),
    "v_lshl_add_u64 v[50:51], v[2:3], 3, v[2:3]\nv_mov_b32_e32 v50, v51": lambda a, b, c: (c << 32 | b) * 9 >> 32,
    "v_lshlrev_b64 v[50:51], v1, v[2:3]\nv_mov_b32_e32 v50, v51": lambda a, b, c: (c << 32 | b) << (a & 63) >> 32,
    "v_ashrrev_i64 v[50:51], v1, v[2:3]": lambda a, b, c: signed(c << 32 | b, 64) >> (a & 63),
}
GFX950_INTEGERS = {
    "v_bitop3_b32 v50, v1, v2, v3 bitop3:0xca": lambda a, b, c: a & b | ~a & c,
    "v_bitop3_b16 v50, v1, v2, v3 bitop3:0x96": lambda a, b, c: (a ^ b ^ c) & 0xFFFF,
}


CASES_OF_INTEGERS = [(name, text) for name in ARCHITECTURES for text in INTEGERS]
CASES_OF_INTEGERS += [("gfx950", text) for text in GFX950_INTEGERS]


@pytest.mark.parametrize("architecture, text", CASES_OF_INTEGERS)
def test_integers(architecture, text):
    rule = (INTEGERS | GFX950_INTEGERS)[text]
    expected = [rule(*map(int, column)) & MASK for column in WORDS.T]
    np.testing.assert_array_equal(assembly.run(text, architecture, WORDS, ["v50"])[0], expected)


FLOATS = np.concatenate(
    [
        np.array(
            [0, -0.0, 1, -1, 0.5, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38, -3e38, 1e-38, 65504, 1e5], np.float32
        ),
        RNG.standard_normal(49).astype(np.float32) * 10,
    ]
)
PAIRS = np.stack([FLOATS, np.roll(FLOATS, 7), np.roll(FLOATS, 20)])


def f64(rule):
    """A rule in double precision, rounded to single."""
    return lambda a, b, c: np.float32(rule(*map(np.float64, (a, b, c))))


def flushed(x):
    return np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x)


FLOAT_RULES = {
    "v_add_f32_e32 v50, v1, v2": f64(lambda a, b, c: a + b),
    "v_sub_f32_e32 v50, v1, v2": f64(lambda a, b, c: a - b),
    "v_mul_f32_e32 v50, v1, v2": f64(lambda a, b, c: a * b),
    "v_mul_f32_e64 v50, -v1, |v2| mul:2": lambda a, b, c: f64(lambda a, b, c: -a * abs(b))(a, b, c) * np.float32(2),
    "v_add_f32_e64 v50, v1, v2 clamp": lambda a, b, c: np.clip(np.nan_to_num(np.float32(a + b), nan=0), 0, 1),
    "v_max_f32_e32 v50, v1, v2": lambda a, b, c: np.fmax(a, b),
    "v_min_f32_e32 v50, v1, v2": lambda a, b, c: np.fmin(a, b),
    "v_max3_f32 v50, v1, v2, v3": lambda a, b, c: np.fmax(np.fmax(a, b), c),
    "v_exp_f32_e32 v50, v1": lambda a, b, c: flushed(np.float32(np.exp2(np.float64(flushed(a))))),
    "v_log_f32_e32 v50, v1": f64(lambda a, b, c: np.log2(flushed(a))),
    "v_rcp_f32_e32 v50, v1": f64(lambda a, b, c: 1 / a),
    "v_rsq_f32_e32 v50, v1": f64(lambda a, b, c: 1 / np.sqrt(flushed(a))),
    "v_sqrt_f32_e32 v50, v1": f64(lambda a, b, c: np.sqrt(flushed(a))),
    "v_rndne_f32_e32 v50, v1": f64(lambda a, b, c: np.rint(a)),
    "v_floor_f32_e32 v50, v1": f64(lambda a, b, c: np.floor(a)),
    "v_ldexp_f32 v50, v1, -3": f64(lambda a, b, c: a / 8),
    "v_cvt_f16_f32_e32 v50, v1\nv_cvt_f32_f16_e32 v50, v50": lambda a, b, c: a.astype(np.float16).astype(np.float32),
    "v_pk_mul_f32 v[50:51], v[2:3], v[2:3] op_sel:[1,0] op_sel_hi:[0,1]": f64(lambda a, b, c: c * b),
    "v_pk_add_f32 v[50:51], v[2:3], v[2:3] op_sel_hi:[1,0] neg_hi:[0,1]\nv_mov_b32_e32 v50, v51": f64(
        lambda a, b, c: c - b
    ),
    "s_movk_i32 s22, 0x198\nv_cmp_class_f32_e64 s[20:21], v1, s22\nv_cndmask_b32_e64 v50, 0, 1.0, s[20:21]": (
        lambda a, b, c: np.float32(np.isfinite(a) & (a != 0))
    ),
    "v_cmp_nlt_f32_e32 vcc, v1, v2\nv_cndmask_b32_e32 v50, v1, v2, vcc": lambda a, b, c: np.where(~(a < b), b, a),
}


def assert_same_floats(got: np.ndarray, expected: np.ndarray) -> None:
    """Bit for bit, any NaN alike."""
    expected = np.asarray(expected, np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(got[number].view(np.uint32), expected[number].view(np.uint32))


@marks.both_architectures
@pytest.mark.parametrize("text", FLOAT_RULES)
def test_floats(architecture, text):
    got = assembly.run(text, architecture, PAIRS, ["v50"])[0].view(np.float32)
    with np.errstate(all="ignore"):
        assert_same_floats(got, FLOAT_RULES[text](*PAIRS))


@marks.both_architectures
@pytest.mark.parametrize("text", ["v_fma_f32 v50, v1, v2, v3", "v_mov_b32_e32 v50, v3\nv_fmac_f32_e32 v50, v1, v2"])
def test_fused_multiply_add(architecture, text):
    """Rounded once: the double sum of a product that double holds exactly is right but for rare double rounding."""
    a, b, c = (RNG.integers(-(2**12), 2**12, 64).astype(np.float32) * 2.0**-6 for _ in range(3))
    tiny = np.float32(2.0**-30)
    got = assembly.run(text, architecture, [a + tiny, b, c], ["v50"])[0].view(np.float32)
    exact = (np.float64(a + tiny) * b + c).astype(np.float32)
    assert_same_floats(got, exact)


@marks.both_architectures
def test_division(architecture):
    """The sequence that a compiler writes for a / b is exact for all of numerator and denominator."""
    text = """
      v_div_scale_f32 v40, s[20:21], v2, v2, v1
      v_div_scale_f32 v41, vcc, v1, v2, v1
      v_rcp_f32_e32 v42, v40
      v_fma_f32 v43, -v40, v42, 1.0
      v_fmac_f32_e32 v42, v43, v42
      v_mul_f32_e32 v44, v41, v42
      v_fma_f32 v45, -v40, v44, v41
      v_fmac_f32_e32 v44, v45, v42
      v_fma_f32 v45, -v40, v44, v41
      v_div_fmas_f32 v44, v45, v42, v44
      v_div_fixup_f32 v50, v44, v2, v1"""
    exponents = RNG.integers(-126, 127, 64)
    for a, b in ((PAIRS[0], PAIRS[1]), (PAIRS[1], PAIRS[2]), (2.0**exponents * 1.3, 2.0 ** -exponents[::-1] * 1.7)):
        a, b = np.float32(a), np.float32(b)
        got = assembly.run(text, architecture, [a, b], ["v50"])[0].view(np.float32)
        with np.errstate(all="ignore"):
            expected = np.float32(a.astype(np.float64) / b)
        normal = ~((np.abs(expected) < 2.0**-125) & (expected != 0))  # results below are rounded twice
        assert_same_floats(got[normal], expected[normal])


@marks.both_architectures
def test_halves(architecture):
    """Packed and mixed instructions, and halves of 32-bit registers by op_sel."""
    a, b = (RNG.standard_normal((64, 2)).astype(np.float16) for _ in range(2))
    c = RNG.standard_normal(64).astype(np.float32)
    text = """
      v_pk_fma_f16 v50, v1, v2, v2 neg_lo:[0,0,1]
      v_fma_mix_f32 v51, v1, v2, v3 op_sel:[1,0,0] op_sel_hi:[1,1,0]
      v_mov_b32_e32 v52, v1
      v_fma_mixhi_f16 v52, v1, -v2, v3 op_sel:[0,1,0] op_sel_hi:[1,1,0]
      v_dot2_f32_f16 v53, v1, v2, v3
      v_pk_max_f16 v54, v1, v2"""
    words = [x.view(np.uint32)[:, 0] for x in (a, b)] + [c]
    fma, mixed, high, dot, largest = assembly.run(text, architecture, words, [f"v{50 + i}" for i in range(5)])
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    expected = np.stack([wide_a[:, 0] * wide_b[:, 0] - wide_b[:, 0], wide_a[:, 1] * wide_b[:, 1] + wide_b[:, 1]], 1)
    np.testing.assert_array_equal(fma.view(np.float16).reshape(64, 2), expected.astype(np.float16))
    np.testing.assert_array_equal(mixed.view(np.float32), (wide_a[:, 1] * wide_b[:, 0] + c).astype(np.float32))
    kept, written = high.view(np.float16).reshape(64, 2).T
    np.testing.assert_array_equal(kept, a[:, 0])
    once = (-wide_a[:, 0] * wide_b[:, 1] + c).astype(np.float32)
    np.testing.assert_array_equal(written, once.astype(np.float16))
    np.testing.assert_array_equal(dot.view(np.float32), ((wide_a * wide_b).sum(1) + c).astype(np.float32))
    np.testing.assert_array_equal(largest.view(np.float16).reshape(64, 2), np.maximum(a, b))


@marks.both_architectures
def test_narrowing_conversions(architecture):
    """To half toward zero, and on gfx950 to half and bfloat16 to nearest even; the inputs have ties."""
    a = np.concatenate([FLOATS, 1 + np.arange(64) * 2.0**-12, 1 + np.arange(64) * 2.0**-9]).astype(np.float32)[64:128]
    text = "v_cvt_pkrtz_f16_f32 v50, v1, v2"
    (packed,) = assembly.run(text, architecture, [a, FLOATS], ["v50"])
    for got, value in zip(packed.view(np.float16).reshape(64, 2).T, (a, FLOATS), strict=True):
        with np.errstate(all="ignore"):
            nearest = value.astype(np.float16)
            over = np.abs(nearest.astype(np.float64)) > np.abs(value)
        expected = np.where(over, np.nextafter(nearest, np.float16(0)), nearest)
        np.testing.assert_array_equal(got, expected)
    if architecture == "gfx942":
        return
    text = "v_cvt_pk_bf16_f32 v50, v1, v2\nv_cvt_pk_f16_f32 v51, v1, v2"
    bfloat, half = assembly.run(text, architecture, [a, FLOATS], ["v50", "v51"])
    for words, dtype in ((bfloat, ml_dtypes.bfloat16), (half, np.float16)):
        got = np.ascontiguousarray(words).view(dtype).reshape(64, 2).astype(np.float32)
        with np.errstate(all="ignore"):
            expected = np.stack([a, FLOATS], 1).astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(got, expected)


# ---- Scalars


SCALARS = {  # the instruction writes s30 from s20, s21 (or pairs of them); its result and SCC
    "s_add_u32 s30, s20, s21": lambda a, b: (a + b, a + b > MASK),
    "s_sub_u32 s30, s20, s21": lambda a, b: (a - b, b > a),
    "s_add_i32 s30, s20, s21": lambda a, b: (a + b, not -(2**31) <= signed(a) + signed(b) < 2**31),
    "s_sub_i32 s30, s20, s21": lambda a, b: (a - b, not -(2**31) <= signed(a) - signed(b) < 2**31),
    "s_add_u32 s31, s20, s21\ns_addc_u32 s30, s20, s21": (
        lambda a, b: (a + b + (a + b >> 32), a + b + (a + b >> 32) > MASK)
    ),
    "s_sub_u32 s31, s20, s21\ns_subb_u32 s30, s21, s20": lambda a, b: (b - a - (b > a), a + (b > a) > b),
    "s_and_b32 s30, s20, s21": lambda a, b: (a & b, a & b),
    "s_andn2_b32 s30, s20, s21": lambda a, b: (a & ~b, a & ~b),
    "s_orn2_b32 s30, s20, s21": lambda a, b: (a | ~b, (a | ~b) & MASK),
    "s_xor_b32 s30, s20, s21": lambda a, b: (a ^ b, a ^ b),
    "s_not_b32 s30, s20": lambda a, b: (~a, ~a & MASK),
    "s_lshl_b32 s30, s20, s21": lambda a, b: (a << (b & 31), a << (b & 31) & MASK),
    "s_lshr_b32 s30, s20, s21": lambda a, b: (a >> (b & 31), a >> (b & 31)),
    "s_ashr_i32 s30, s20, s21": lambda a, b: (signed(a) >> (b & 31), signed(a) >> (b & 31)),
    "s_lshl2_add_u32 s30, s20, s21": lambda a, b: (4 * a + b, 4 * a + b > MASK),
    "s_bfe_u32 s30, s20, 0x70004": lambda a, b: (a >> 4 & 127, a >> 4 & 127),
    "s_bfe_i32 s30, s20, 0x70004": lambda a, b: (signed(a >> 4, 7), a >> 4 & 127),
    "s_abs_i32 s30, s20": lambda a, b: (abs(signed(a)), a),
    "s_min_i32 s30, s20, s21": lambda a, b: (min(a, b, key=signed), signed(a) < signed(b)),
    "s_max_u32 s30, s20, s21": lambda a, b: (max(a, b), a > b),
    "s_bcnt1_i32_b64 s30, s[20:21]": lambda a, b: (a.bit_count() + b.bit_count(), a | b),
    "s_cmp_lt_i32 s20, s21\ns_cselect_b32 s30, s20, s21": lambda a, b: (
        min(a, b, key=signed) if signed(a) != signed(b) else b,
        signed(a) < signed(b),
    ),
    "s_cmp_lg_u64 s[20:21], 0\ns_mov_b32 s30, s20": lambda a, b: (a, a | b),
    "s_bitcmp1_b32 s20, 5\ns_mov_b32 s30, s20": lambda a, b: (a, a >> 5 & 1),
    "s_cmpk_gt_i32 s20, 0xfffe\ns_mov_b32 s30, s20": lambda a, b: (a, signed(a) > -2),
    "s_mov_b32 s30, s20\ns_addk_i32 s30, 0xfff0": lambda a, b: (a - 16, not signed(a) - 16 >= -(2**31)),
}
NO_SCC = {  # SCC stays
    "s_mul_i32 s30, s20, s21": lambda a, b: a * b,
    "s_mul_hi_u32 s30, s20, s21": lambda a, b: a * b >> 32,
    "s_mul_hi_i32 s30, s20, s21": lambda a, b: signed(a) * signed(b) >> 32,
    "s_bfm_b32 s30, 5, s21": lambda a, b: 31 << (b & 31),
    "s_brev_b32 s30, s20": lambda a, b: int(f"{a:032b}"[::-1], 2),
    "s_ff1_i32_b32 s30, s20": lambda a, b: (a & -a).bit_length() - 1,
    "s_flbit_i32_b32 s30, s20": lambda a, b: 32 - a.bit_length() if a else -1,
    "s_sext_i32_i16 s30, s20": lambda a, b: signed(a, 16),
    "s_pack_ll_b32_b16 s30, s20, s21": lambda a, b: a & 0xFFFF | b << 16,
    "s_movk_i32 s30, 0x8001": lambda a, b: -0x7FFF,
    "s_mov_b64 s[30:31], s[20:21]": lambda a, b: a,
}
CASES = [(a, b) for a in CORNERS for b in CORNERS[::2]]


@marks.both_architectures
@pytest.mark.parametrize("text", [*SCALARS, *NO_SCC])
def test_scalars(architecture, text):
    """Each pair of values in turn: one lane of v1 and v2, results gathered in v50 (value) and v51 (SCC)."""
    body = ["v_mov_b32_e32 v50, 0", "v_mov_b32_e32 v51, 0"]
    for lane in range(len(CASES)):
        body += [f"v_readlane_b32 s20, v1, {lane}", f"v_readlane_b32 s21, v2, {lane}", "s_cmp_eq_u32 0, 0", text]
        body += ["s_cselect_b32 s32, 1, 0", f"v_writelane_b32 v50, s30, {lane}", f"v_writelane_b32 v51, s32, {lane}"]
    inputs = np.zeros((2, 64), np.uint32)
    inputs[:, : len(CASES)] = np.array(CASES).T
    values, flags = assembly.run("\n".join(body), architecture, inputs, ["v50", "v51"])
    for lane, (a, b) in enumerate(CASES):
        value, flag = SCALARS[text](a, b) if text in SCALARS else (NO_SCC[text](a, b), 1)
        assert values[lane] == value & MASK, (hex(a), hex(b))
        assert flags[lane] == bool(flag), (hex(a), hex(b))


@marks.both_architectures
def test_control_flow_and_exec(architecture):
    """A loop whose lanes leave one by one: lane i goes round i + 1 times."""
    text = """
      v_mov_b32_e32 v50, 0
      s_mov_b64 s[20:21], exec
    .Lagain:
      v_add_u32_e32 v50, 1, v50
      v_cmp_lt_u32_e32 vcc, v50, v1
      s_and_saveexec_b64 s[22:23], vcc
      s_cbranch_execnz .Lagain
      s_mov_b64 exec, s[20:21]"""
    (rounds,) = assembly.run(text, architecture, [np.arange(1, 65, dtype=np.uint32)], ["v50"])
    np.testing.assert_array_equal(rounds, np.arange(64) + 1)


@marks.both_architectures
def test_the_mode_register(architecture):
    text = """
      s_getreg_b32 s20, hwreg(HW_REG_MODE, 0, 8)
      s_movk_i32 s21, 1
      s_setreg_b32 hwreg(HW_REG_MODE, 23, 1), s21
      s_getreg_b32 s22, hwreg(HW_REG_MODE, 22, 3)
      v_mov_b32_e32 v50, s20
      v_mov_b32_e32 v51, s22"""
    before, after = assembly.run(text, architecture, [], ["v50", "v51"])
    assert set(before) == {0xF0}
    assert set(after) == {2}
