"""LDS: accesses of every width, transposing reads, atomic operations, loads from memory straight into LDS."""

import numpy as np
import pytest
from gfx9 import assembly, marks

pytestmark = marks.needs_llvm
LANE = np.arange(64, dtype=np.uint32)
RANDOM = np.random.default_rng(0).integers(0, 2**32, (4, 64), dtype=np.uint32)


@marks.both_architectures
@pytest.mark.parametrize("bits", [32, 64, 96, 128])
def test_wide_accesses(architecture, bits):
    """Lane i writes words i * n to i * n + n - 1; lane i reads what lane 63 - i wrote."""
    n = bits // 32
    source = "v1" if n == 1 else f"v[2:{1 + n}]"
    inputs = RANDOM[:1] if n == 1 else np.concatenate([RANDOM[:1], RANDOM[:n]])
    text = f"""
      v_mul_u32_u24_e32 v40, {4 * n}, v0
      ds_write_b{bits} v40, {source} offset:16
      v_sub_u32_e32 v41, {4 * n * 63}, v40
      s_waitcnt lgkmcnt(0)
      ds_read_b{bits} {"v50" if n == 1 else f"v[50:{49 + n}]"}, v41 offset:16
      s_waitcnt lgkmcnt(0)"""
    got = assembly.run(text, architecture, inputs, [f"v{50 + i}" for i in range(n)], lds=2048)
    np.testing.assert_array_equal(got, RANDOM[:n, ::-1])


@marks.both_architectures
def test_two_accesses_at_once(architecture):
    text = """
      v_lshlrev_b32_e32 v40, 2, v0
      v_lshlrev_b32_e32 v41, 3, v0
      ds_write2_b32 v40, v1, v2 offset1:64
      ds_write2st64_b32 v40, v3, v4 offset0:2 offset1:3
      s_waitcnt lgkmcnt(0)
      ds_read2_b32 v[50:51], v40 offset0:64 offset1:128
      ds_read2st64_b32 v[52:53], v40 offset0:3
      ds_read2_b64 v[54:57], v41 offset1:64
      s_waitcnt lgkmcnt(0)"""
    got = assembly.run(text, architecture, RANDOM, [f"v{50 + i}" for i in range(8)], lds=1024)
    flat = RANDOM.reshape(-1)
    np.testing.assert_array_equal(got[:4], [RANDOM[1], RANDOM[2], RANDOM[3], RANDOM[0]])
    np.testing.assert_array_equal(got[4:6].T, flat[:128].reshape(64, 2))
    np.testing.assert_array_equal(got[6:8].T, flat[128:].reshape(64, 2))


@marks.both_architectures
def test_bytes_and_halves(architecture):
    text = """
      v_lshlrev_b32_e32 v40, 2, v0
      ds_write_b32 v40, v1
      ds_write_b8 v40, v2 offset:1
      ds_write_b16_d16_hi v40, v2 offset:2
      s_waitcnt lgkmcnt(0)
      v_mov_b32_e32 v54, v3
      v_mov_b32_e32 v55, v3
      ds_read_u8 v50, v40 offset:1
      ds_read_i8 v51, v40 offset:1
      ds_read_u16 v52, v40 offset:2
      ds_read_i16 v53, v40 offset:2
      ds_read_u16_d16 v54, v40
      ds_read_u16_d16_hi v55, v40
      s_waitcnt lgkmcnt(0)"""
    got = assembly.run(text, architecture, RANDOM, [f"v{50 + i}" for i in range(6)], lds=256)
    byte, high = RANDOM[1] & 0xFF, RANDOM[1] >> 16
    low = RANDOM[0] & 0xFF | byte << 8
    expected = [
        byte,
        byte.astype(np.uint8).view(np.int8).astype(np.int32).view(np.uint32),
        high,
        high.astype(np.uint16).view(np.int16).astype(np.int32).view(np.uint32),
        RANDOM[2] & 0xFFFF0000 | low,
        RANDOM[2] & 0xFFFF | low << 16,
    ]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("bits", [8, 16])
def test_transposing_reads(bits):
    """Each 16 lanes read a matrix with a row of 8 bytes a lane, and get it so that a lane holds part of a column."""
    n = 64 // bits  # elements of 8 bytes
    dtype = {8: np.uint8, 16: np.uint16}[bits]
    text = f"""
      v_lshlrev_b32_e32 v40, 3, v0
      ds_write_b64 v40, v[2:3]
      s_waitcnt lgkmcnt(0)
      ds_read_b64_tr_b{bits} v[50:51], v40
      s_waitcnt lgkmcnt(0)"""
    got = assembly.run(text, "gfx950", RANDOM[:3], ["v50", "v51"], lds=512)
    elements = np.ascontiguousarray(RANDOM[1:3].T).view(dtype)  # [lane][element]
    result = np.ascontiguousarray(got.T).view(dtype)
    for lane in range(64):
        first, i = lane // 16 * 16, lane % 16
        for q in range(n):
            assert result[lane, q] == elements[first + 16 // n * q + i // n, i % n]


@marks.both_architectures
def test_atomic_operations(architecture):
    text = """
      v_and_b32_e32 v40, 3, v0
      v_lshlrev_b32_e32 v40, 2, v40
      v_mov_b32_e32 v41, 0
      ds_write_b32 v40, v41
      s_waitcnt lgkmcnt(0)
      ds_add_rtn_u32 v50, v40, v0
      s_waitcnt lgkmcnt(0)
      ds_max_u32 v40, v1
      s_waitcnt lgkmcnt(0)
      ds_read_b32 v51, v40
      s_waitcnt lgkmcnt(0)"""
    before, after = assembly.run(text, architecture, RANDOM[:1], ["v50", "v51"], lds=16)
    for i in range(64):
        assert before[i] == sum(range(i % 4, i, 4))
        assert after[i] == max(sum(range(i % 4, 64, 4)), *RANDOM[0, i % 4 :: 4])


@pytest.mark.parametrize("architecture, words", [("gfx942", 1), ("gfx950", 1), ("gfx950", 3), ("gfx950", 4)])
def test_loads_into_lds(architecture, words):
    """They begin at M0 and lay lane after lane; the offset counts on both sides."""
    name = {1: "dword", 3: "dwordx3", 4: "dwordx4"}[words]
    text = f"""
      v_mul_u32_u24_e32 v40, {4 * words}, v0
      v_sub_u32_e32 v41, {63 * 4 * words}, v40
      s_movk_i32 m0, 32
      global_load_lds_{name} v41, s[4:5] offset:0
      s_waitcnt vmcnt(0)
      v_lshlrev_b32_e32 v42, 2, v0
      ds_read_b32 v50, v42 offset:32
      s_waitcnt lgkmcnt(0)"""
    got = assembly.run(text, architecture, RANDOM, ["v50"], lds=2048)
    source = RANDOM.reshape(-1)[: 64 * words].reshape(64, words)[::-1]
    np.testing.assert_array_equal(got[0], source.reshape(-1)[:64])
