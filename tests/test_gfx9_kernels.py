"""Whole kernels compiled from HIP, and bugs planted in them: each is caught by the check made for it, or by numbers."""

import struct

import ml_dtypes
import numpy as np
import pytest
from gfx9 import EmulatorError, Memory, Program, compile_assembly, marks
from gfx9.samples import load

pytestmark = [marks.needs_llvm, marks.both_architectures]
DEPTH = 96


def gemm_error(program: Program, **checks) -> float:
    """The largest error of C, with rows of B in pages 5, 0, 3, 1 of 6 and NaN in the other two."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((64, DEPTH)).astype(ml_dtypes.bfloat16) for _ in range(2))
    pages = np.array([5, 0, 3, 1], np.int32)
    paged = np.full((6, 16, DEPTH), np.nan, ml_dtypes.bfloat16)
    paged[pages] = b.reshape(4, 16, DEPTH)
    c, memory = np.full((64, 64), np.nan, np.float32), Memory()
    inputs = [memory.allocate(x, writable=False) for x in (a, paged, pages)]
    target = memory.allocate(c)
    arguments = struct.pack("<QQQQi", *inputs, target, DEPTH)
    program.launch("gemm", (1, 1, 1), (256, 1, 1), arguments, memory=memory, **checks)
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    return float(np.abs(memory.read(target, c) - expected).max())


@pytest.mark.parametrize("order", ["forward", "backward", "interleaved"])
def test_gemm(architecture, order):
    assert gemm_error(load("gemm", architecture), order=order) < 1e-4


def test_softmax(architecture):
    rng = np.random.default_rng(1)
    x, y, totals = rng.standard_normal((8, 256)).astype(np.float32), np.full((8, 256), np.nan, np.float32), np.zeros(1)
    memory, totals = Memory(), totals.astype(np.float32)
    addresses = [memory.allocate(x, writable=False), memory.allocate(y), memory.allocate(totals)]
    program = load("softmax", architecture)
    done = program.launch("softmax", (2, 1, 1), (256, 1, 1), struct.pack("<QQQ", *addresses), memory=memory)
    exponentials = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    sums = exponentials.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(memory.read(addresses[1], y), exponentials / sums, rtol=0, atol=1e-6)
    np.testing.assert_allclose(memory.read(addresses[2], totals), [sums.sum()], rtol=1e-6)
    assert done.global_read == x.nbytes + 8 * 4 + 8 * 24  # rows, the atomic operation's, pointers by each wave


def test_the_same_inputs_give_the_same_bits(architecture):
    program = load("gemm", architecture)
    assert gemm_error(program) == gemm_error(program, order="backward")


@pytest.mark.parametrize("order", ["forward", "backward", "interleaved"])
def test_planted_missing_barrier(architecture, order):
    with pytest.raises(EmulatorError, match="LDS race"):
        gemm_error(load("gemm", architecture, "-DBUG_MISSING_BARRIER"), order=order)


def test_planted_page_off_by_one(architecture):
    """The page behind the last is read past the table's end."""
    with pytest.raises(EmulatorError, match="out of bounds: lane"):
        gemm_error(load("gemm", architecture, "-DBUG_PAGE"))


def test_planted_wrong_matrix_operand(architecture):
    """Nothing is out of bounds or late: only the numbers tell."""
    assert gemm_error(load("gemm", architecture, "-DBUG_OPERAND")) > 1


@pytest.mark.parametrize("wait", ["s_waitcnt vmcnt(0)", ""])
def test_planted_missing_wait(architecture, wait):
    """A wave adds one to what it loads; the compiler would have put the wait there."""
    body = f"""
      s_load_dwordx2 s[4:5], s[0:1], 0x0
      v_lshlrev_b32_e32 v1, 2, v0
      s_waitcnt lgkmcnt(0)
      global_load_dword v2, v1, s[4:5]
      {wait}
      v_add_f32_e32 v2, 1.0, v2
      global_store_dword v1, v2, s[4:5]"""
    program, memory = Program(compile_assembly(body, architecture), architecture), Memory()
    values = np.arange(64, dtype=np.float32)
    address = memory.allocate(values)

    def launch():
        program.launch("kernel", (1, 1, 1), (64, 1, 1), struct.pack("<Q", address), memory=memory)

    if wait:
        launch()
        np.testing.assert_array_equal(memory.read(address, values), values + 1)
    else:
        with pytest.raises(EmulatorError, match=r"missing wait: v2 .*vmcnt.*v_add_f32_e32 v2, 1\.0, v2"):
            launch()
