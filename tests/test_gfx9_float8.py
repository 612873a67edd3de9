"""8-bit conversions against ml_dtypes, over all inputs.

gfx942 has the FNUZ formats, gfx950 OCP's. Overflow goes by MODE's bit 23, FP16_OVFL: the CDNA3 and CDNA4 guides' table
"FP16_OVFL rule" of "BF8 / FP8 formats and conversions". Set, overflow and infinity give the largest number; clear (the
default), NaN for FP8, infinity for OCP's BF8. The sign of a NaN is not in that table and not compared.
"""

import struct

import ml_dtypes
import numpy as np
import pytest
from gfx9 import EmulatorError, Memory, Program, compile_hip, marks

pytestmark = marks.needs_llvm
DTYPES = {
    ("gfx942", "fp8"): ml_dtypes.float8_e4m3fnuz,
    ("gfx942", "bf8"): ml_dtypes.float8_e5m2fnuz,
    ("gfx950", "fp8"): ml_dtypes.float8_e4m3fn,
    ("gfx950", "bf8"): ml_dtypes.float8_e5m2,
}
FORMATS = pytest.mark.parametrize("architecture, name", DTYPES)
KERNELS = """
#define KERNEL extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, 256)))
typedef float Pair __attribute__((ext_vector_type(2)));

__attribute__((device)) inline int index() {
  return __builtin_amdgcn_workgroup_id_x() * 256 + __builtin_amdgcn_workitem_id_x();
}

// Bit 23 of MODE, one bit wide.
KERNEL void narrow(const float* in, int* out, int clamp) {
  int i = index();
  if (clamp) __builtin_amdgcn_s_setreg(23 << 6 | 1, 1);
  float a = in[2 * i], b = in[2 * i + 1];
  int packed = __builtin_amdgcn_cvt_pk_FORMAT_f32(a, b, 0, false);
  out[i] = __builtin_amdgcn_cvt_pk_FORMAT_f32(b, a, packed, true);
}

KERNEL void widen(const int* in, float* out) {
  int i = index(), word = in[i];
  out[8 * i + 0] = __builtin_amdgcn_cvt_f32_FORMAT(word, 0);
  out[8 * i + 1] = __builtin_amdgcn_cvt_f32_FORMAT(word, 1);
  out[8 * i + 2] = __builtin_amdgcn_cvt_f32_FORMAT(word, 2);
  out[8 * i + 3] = __builtin_amdgcn_cvt_f32_FORMAT(word, 3);
  Pair low = __builtin_amdgcn_cvt_pk_f32_FORMAT(word, false), high = __builtin_amdgcn_cvt_pk_f32_FORMAT(word, true);
  float l0 = low[0], l1 = low[1], h0 = high[0], h1 = high[1];
  out[8 * i + 4] = l0;
  out[8 * i + 5] = l1;
  out[8 * i + 6] = h0;
  out[8 * i + 7] = h1;
}

#if defined(__gfx950__)
typedef __bf16 Brains __attribute__((ext_vector_type(2)));
typedef _Float16 Halves __attribute__((ext_vector_type(2)));

KERNEL void widen_to_16(const int* in, Brains* brains, Halves* halves, float scale) {
  int i = index(), word = in[i];
  brains[2 * i + 0] = __builtin_amdgcn_cvt_scalef32_pk_bf16_FORMAT(word, scale, false);
  brains[2 * i + 1] = __builtin_amdgcn_cvt_scalef32_pk_bf16_FORMAT(word, scale, true);
  halves[2 * i + 0] = __builtin_amdgcn_cvt_scalef32_pk_f16_FORMAT(word, scale, false);
  halves[2 * i + 1] = __builtin_amdgcn_cvt_scalef32_pk_f16_FORMAT(word, scale, true);
}
#endif
"""


def load(architecture, name):
    return Program(compile_hip(KERNELS.replace("FORMAT", name), architecture), architecture)


def narrow(architecture, name, values, clamp):
    """Bytes of values [n], each converted twice: in the low and in the high half of a register."""
    memory = Memory()
    source, results = memory.allocate(values, writable=False), np.full((len(values) // 2, 4), 0xAA, np.uint8)
    target = memory.allocate(results)
    arguments = struct.pack("<QQi", source, target, clamp)
    load(architecture, name).launch("narrow", (len(values) // 512, 1, 1), (256, 1, 1), arguments, memory=memory)
    got = memory.read(target, results)
    np.testing.assert_array_equal(got[:, 2:], got[:, 1::-1])
    return got[:, :2].reshape(-1)


def assert_same_bytes(got, expected, dtype):
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.view(dtype).astype(np.float32)), nan)
    np.testing.assert_array_equal(got[~nan], expected[~nan].view(np.uint8))


def all_bfloat16():
    return np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


@FORMATS
def test_every_byte_widens(architecture, name):
    memory = Memory()
    codes = np.arange(1024, dtype=np.uint16).astype(np.uint8)
    results = np.full((256, 8), 7, np.float32)
    source, target = memory.allocate(codes.view(np.int32), writable=False), memory.allocate(results)
    load(architecture, name).launch("widen", (1, 1, 1), (256, 1, 1), struct.pack("<QQ", source, target), memory=memory)
    expected = codes.view(DTYPES[architecture, name]).astype(np.float32).reshape(256, 4)
    np.testing.assert_array_equal(memory.read(target, results), np.concatenate([expected, expected], axis=1))


def widen_to_16(name, scale):
    """Every byte of gfx950's format as bfloat16 and as float16."""
    memory = Memory()
    codes = np.arange(1024, dtype=np.uint16).astype(np.uint8)
    results = [np.zeros(1024, ml_dtypes.bfloat16), np.zeros(1024, np.float16)]
    source = memory.allocate(codes.view(np.int32), writable=False)
    targets = [memory.allocate(result.view(np.uint16)) for result in results]
    arguments = struct.pack("<QQQf", source, *targets, scale)
    load("gfx950", name).launch("widen_to_16", (1, 1, 1), (256, 1, 1), arguments, memory=memory)
    got = [memory.read(target, result.view(np.uint16)) for target, result in zip(targets, results, strict=True)]
    return codes, [bits.view(result.dtype) for bits, result in zip(got, results, strict=True)]


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("name", ["fp8", "bf8"])
def test_every_byte_widens_to_16_bits(name, scale):
    codes, results = widen_to_16(name, scale)
    expected = codes.view(DTYPES["gfx950", name]).astype(np.float32) * np.float32(scale)
    for got in results:
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got.astype(np.float32), expected.astype(got.dtype).astype(np.float32))


def test_a_scale_that_is_no_power_of_two_is_refused():
    with pytest.raises(EmulatorError, match="a scale that is no power of two is not modelled"):
        widen_to_16("fp8", 1.5)


@FORMATS
def test_every_bfloat16_narrows(architecture, name):
    values, dtype = all_bfloat16(), DTYPES[architecture, name]
    with np.errstate(invalid="ignore", over="ignore"):
        expected = values.astype(dtype)
    assert_same_bytes(narrow(architecture, name, values, False), expected, dtype)


@FORMATS
def test_the_mode_bit_clamps(architecture, name):
    values, dtype = all_bfloat16(), DTYPES[architecture, name]
    largest = float(ml_dtypes.finfo(dtype).max)
    with np.errstate(invalid="ignore"):
        expected = np.clip(values, -largest, largest).astype(dtype)
    assert_same_bytes(narrow(architecture, name, values, True), expected, dtype)


@FORMATS
def test_ties_go_to_even(architecture, name):
    """fp32 values between and around neighbours, and around the largest number, which bfloat16 has none of."""
    dtype = DTYPES[architecture, name]
    codes = np.arange(256, dtype=np.uint16).astype(np.uint8).view(dtype).astype(np.float64)
    finite = np.sort(np.unique(codes[np.isfinite(codes)]))
    middles = (finite[1:] + finite[:-1]) / 2
    edge = finite[-1] + (finite[-1] - finite[-2]) / 2
    around = [np.nextafter(np.float32(x), np.float32(x + d)) for x in (*middles, edge, -edge) for d in (-1, 0, 1)]
    values = np.resize(np.array(around, np.float32), 2048)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = values.astype(dtype)
    assert_same_bytes(narrow(architecture, name, values, False), expected, dtype)
