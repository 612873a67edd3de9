"""Matrix instructions against the formulas of the CDNA4 guide's "General input and output layout" (7.1.4)."""

import ml_dtypes
import numpy as np
import pytest
from gfx9 import assembly, marks, mfma

pytestmark = marks.needs_llvm
FNUZ = {"fp8": ml_dtypes.float8_e4m3fnuz, "bf8": ml_dtypes.float8_e5m2fnuz}
OCP = {"fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2}
COMMON = [
    "v_mfma_f32_32x32x1_2b_f32",
    "v_mfma_f32_16x16x1_4b_f32",
    "v_mfma_f32_4x4x1_16b_f32",
    "v_mfma_f32_32x32x2_f32",
    "v_mfma_f32_16x16x4_f32",
    "v_mfma_f32_32x32x4_2b_f16",
    "v_mfma_f32_16x16x4_4b_bf16",
    "v_mfma_f32_4x4x4_16b_f16",
    "v_mfma_f32_32x32x8_f16",
    "v_mfma_f32_32x32x8_bf16",
    "v_mfma_f32_16x16x16_f16",
    "v_mfma_f32_16x16x16_bf16",
    "v_mfma_f32_32x32x16_fp8_fp8",
    "v_mfma_f32_32x32x16_bf8_fp8",
    "v_mfma_f32_16x16x32_fp8_bf8",
    "v_mfma_f32_16x16x32_fp8_fp8",
    "v_mfma_i32_32x32x16_i8",
    "v_mfma_i32_16x16x32_i8",
]
GFX950 = [
    "v_mfma_f32_32x32x16_bf16",
    "v_mfma_f32_32x32x16_f16",
    "v_mfma_f32_16x16x32_bf16",
    "v_mfma_f32_16x16x32_f16",
    "v_mfma_i32_32x32x32_i8",
    "v_mfma_i32_16x16x64_i8",
    "v_mfma_f32_32x32x64_f8f6f4",
    "v_mfma_f32_16x16x128_f8f6f4",
]
CASES = [("gfx942", name) for name in COMMON] + [("gfx950", name) for name in COMMON + GFX950]


def dtype_of(name: str, architecture: str):
    if name in FNUZ:
        return (FNUZ if architecture == "gfx942" else OCP)[name]
    return {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "i8": np.int8}[name]


def pack(dense: np.ndarray, rows: int, depth: int, blocks: int) -> np.ndarray:
    """A [block][row][k] (or B transposed) as registers [register][lane]."""
    per_lane = depth // (64 // (rows * blocks))
    items = np.zeros((64, per_lane), dense.dtype)
    eight_bits_in_runs = dense.dtype.itemsize == 1 and per_lane == 32
    for b in range(blocks):
        for i in range(rows):
            for k in range(depth):
                if eight_bits_in_runs:  # two runs of 16: the first half of k, then the second
                    half, inner = divmod(k, depth // 2)
                    lane, item = i + rows * (inner // 16), 16 * half + inner % 16
                else:
                    lane, item = i + rows * (b + blocks * (k // per_lane)), k % per_lane
                items[lane, item] = dense[b, i, k]
    return np.ascontiguousarray(items).view(np.uint32).T


def place(b: int, i: int, j: int, rows: int, columns: int) -> tuple[int, int]:
    """The item and the lane of D[b, i, j]."""
    height = 4
    blocks_an_item = -(-64 // (columns * rows // height))
    rows_an_item = (64 // blocks_an_item) // columns
    groups = rows // (height * rows_an_item)
    item = i % height + height * (i // (height * rows_an_item) + groups * (b // blocks_an_item))
    return item, j + columns * ((i // height) % rows_an_item + rows_an_item * (b % blocks_an_item))


def multiply(architecture, mnemonic, a, b, c, modifiers="", scales=()):
    """D [block][row][column] of one instruction, from dense operands; b is transposed. Scales: bits of each lane."""
    shape = mfma.shape(mnemonic)
    registers = [np.zeros((1, 64), np.uint32), pack(a, shape.rows, shape.depth, shape.blocks)]
    registers.append(pack(b, shape.columns, shape.depth, shape.blocks))
    result = np.zeros((shape.rows * shape.columns * shape.blocks // 64, 64), np.uint32)
    for index in np.ndindex(c.shape):
        result[place(*index, shape.rows, shape.columns)] = c[index].view(np.uint32)
    registers += [result, *(np.asarray(scale, np.uint32)[None] for scale in scales)]
    names, first, inputs = [], 1, []
    for block in registers:  # aligned to even registers
        if len(block) > 1 and first % 2:
            inputs.append(np.zeros((1, 64), np.uint32))
            first += 1
        names.append(f"v[{first}:{first + len(block) - 1}]" if len(block) > 1 else f"v{first}")
        inputs.append(block)
        first += len(block)
    target = f"v[60:{59 + len(result)}]"
    text = f"{mnemonic} {target}, {', '.join(names[1:])} {modifiers}\ns_nop 15\ns_nop 15"
    words = assembly.run(text, architecture, np.concatenate(inputs), [f"v{60 + r}" for r in range(len(result))])
    d = np.empty(c.shape, c.dtype)
    for index in np.ndindex(c.shape):
        d[index] = words[place(*index, shape.rows, shape.columns)].view(c.dtype)
    return d


def operands(shape, a_type, b_type, seed=0):
    """Small integers: every sum is exact."""
    rng = np.random.default_rng(seed)
    a = rng.integers(-4, 5, (shape.blocks, shape.rows, shape.depth)).astype(a_type)
    b = rng.integers(-4, 5, (shape.blocks, shape.columns, shape.depth)).astype(b_type)
    c = rng.integers(-99, 100, (shape.blocks, shape.rows, shape.columns))
    return a, b, c.astype(np.int32 if shape.accumulator == "i32" else np.float32)


def oracle(a, b, c):
    return np.einsum("bik,bjk->bij", a.astype(np.float64), b.astype(np.float64)) + c


@pytest.mark.parametrize("architecture, mnemonic", CASES)
def test_layout(architecture, mnemonic):
    shape = mfma.shape(mnemonic)
    formats = mfma.formats(shape, {})
    a, b, c = operands(shape, *(dtype_of(name, architecture) for name in formats))
    np.testing.assert_array_equal(multiply(architecture, mnemonic, a, b, c), oracle(a, b, c))


@pytest.mark.parametrize("mnemonic", ["v_mfma_scale_f32_32x32x64_f8f6f4", "v_mfma_scale_f32_16x16x128_f8f6f4"])
def test_block_scales(mnemonic):
    """A power of two for each row and 32 elements of k; here in byte 1 for A and byte 2 for B."""
    shape = mfma.shape(mnemonic)
    a, b, c = operands(shape, OCP["fp8"], OCP["bf8"], seed=1)
    rng = np.random.default_rng(2)
    exponents = rng.integers(-3, 4, (2, shape.depth // 32, shape.rows))
    lanes = (exponents + 127).reshape(2, 64)
    got = multiply(
        "gfx950", mnemonic, a, b, c, "op_sel:[1,0,0] op_sel_hi:[0,1,0] blgp:1", (lanes[0] << 8, lanes[1] << 16)
    )
    scale_a, scale_b = (np.repeat(2.0 ** exponents[k].T, 32, axis=1)[None] for k in range(2))
    np.testing.assert_array_equal(got, oracle(a.astype(np.float64) * scale_a, b.astype(np.float64) * scale_b, c))


@marks.both_architectures
def test_sums_are_rounded_once_and_keep_subnormal_numbers(architecture):
    mnemonic = "v_mfma_f32_32x32x8_f16"
    shape = mfma.shape(mnemonic)
    rng = np.random.default_rng(3)
    a, b, c = operands(shape, np.float16, np.float16)
    a = rng.standard_normal(a.shape).astype(np.float16)
    b = rng.standard_normal(b.shape).astype(np.float16)
    a[0, 0], b[0, 0], c[0, 0, 0] = 2**-24, 2**-24, 0  # subnormal in half
    got = multiply(architecture, mnemonic, a, b, c)
    np.testing.assert_array_equal(got, oracle(a, b, c).astype(np.float32))
    assert got[0, 0, 0] == 8 * 2.0**-48


@marks.both_architectures
def test_exec_is_ignored(architecture):
    shape = mfma.shape("v_mfma_f32_16x16x16_f16")
    a, b, c = operands(shape, np.float16, np.float16)
    with_lanes_off = "a[0:3], v[2:3], v[4:5], 0\ns_nop 15\ns_mov_b64 exec, -1"
    inputs = np.zeros((5, 64), np.uint32)
    inputs[1:3], inputs[3:5] = pack(a, 16, 16, 1), pack(b, 16, 16, 1)
    words = assembly.run(f"s_mov_b64 exec, 3\nv_mfma_f32_16x16x16_f16 {with_lanes_off}", architecture, inputs, ["a0"])
    expected = oracle(a, b, np.zeros_like(c))
    for i in (0, 4, 8, 12):
        np.testing.assert_array_equal(words[0].view(np.float32)[4 * i : 4 * i + 16], expected[0, i])


@marks.both_architectures
@pytest.mark.parametrize("clamp", [False, True])
def test_overflow_by_the_mode_bit(architecture, clamp):
    shape = mfma.shape("v_mfma_f32_16x16x4_f32")
    a, b, _ = operands(shape, np.float32, np.float32)
    a[0, 0], b[0, 0], b[0, 1] = 2.0**100, 2.0**100, -(2.0**100)
    inputs = np.zeros((8, 64), np.uint32)
    inputs[1], inputs[2] = pack(a, 16, 4, 1)[0], pack(b, 16, 4, 1)[0]
    text = f"""
      s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), {int(clamp)}
      v_mfma_f32_16x16x4_f32 a[0:3], v2, v3, 0
      s_nop 15"""
    words = assembly.run(text, architecture, inputs, ["a0"])
    largest = np.finfo(np.float32).max if clamp else np.inf
    assert words[0].view(np.float32)[:2].tolist() == [largest, -largest]
