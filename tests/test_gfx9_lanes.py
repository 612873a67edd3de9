"""Moves between lanes: DPP, ds_bpermute and its like, readlane, swaps."""

import numpy as np
import pytest
from gfx9 import assembly, marks

pytestmark = marks.needs_llvm
LANE = np.arange(64)
VALUES = (LANE * 7 + 1000).astype(np.uint32)
OLD = (LANE + 5).astype(np.uint32)


def row(lane):
    return lane // 16 * 16


DPP = {  # control: the source of a lane, None where there is none
    "quad_perm:[2,0,3,1]": lambda i: i // 4 * 4 + [2, 0, 3, 1][i % 4],
    "row_shl:3": lambda i: i + 3 if i % 16 + 3 < 16 else None,
    "row_shr:5": lambda i: i - 5 if i % 16 >= 5 else None,
    "row_ror:4": lambda i: row(i) + (i % 16 - 4) % 16,
    "row_mirror": lambda i: row(i) + 15 - i % 16,
    "row_half_mirror": lambda i: i // 8 * 8 + 7 - i % 8,
    "row_newbcast:6": lambda i: row(i) + 6,
    "row_bcast:15": lambda i: row(i) - 1 if i >= 16 else None,
    "row_bcast:31": lambda i: 31 if i >= 32 else None,
    "wave_shl:1": lambda i: i + 1 if i < 63 else None,
    "wave_shr:1": lambda i: i - 1 if i > 0 else None,
    "wave_rol:1": lambda i: (i + 1) % 64,
    "wave_ror:1": lambda i: (i - 1) % 64,
}


@marks.both_architectures
@pytest.mark.parametrize("control", DPP)
@pytest.mark.parametrize("zero", [False, True])
def test_dpp(architecture, control, zero):
    """A lane without a source keeps its value, or gets 0 with bound_ctrl; masks of rows and banks leave lanes alone."""
    text = f"v_mov_b32_dpp v2, v1 {control} row_mask:0xb bank_mask:0x7{' bound_ctrl:0' if zero else ''}"
    expected = OLD.copy()
    for i in range(64):
        if not (0xB >> i // 16 & 1 and 0x7 >> i % 16 // 4 & 1):
            continue
        source = DPP[control](i)
        if source is not None:
            expected[i] = VALUES[source]
        elif zero:
            expected[i] = 0
    np.testing.assert_array_equal(assembly.run(text, architecture, [VALUES, OLD], ["v2"])[0], expected)


@marks.both_architectures
def test_dpp_from_inactive_lanes(architecture):
    """They count as no source."""
    text = "s_mov_b64 exec, 0xff\nv_add_u32_dpp v2, v1, v3 row_ror:4 row_mask:0xf bank_mask:0xf\ns_mov_b64 exec, -1"
    expected = OLD.copy()
    expected[4:8] = VALUES[0:4] + 2 * OLD[4:8]
    np.testing.assert_array_equal(assembly.run(text, architecture, [VALUES, OLD, 2 * OLD], ["v2"])[0], expected)


@marks.both_architectures
def test_bpermute_and_permute(architecture):
    rng = np.random.default_rng(0)
    order = rng.permutation(64)
    text = """
      v_lshlrev_b32_e32 v2, 2, v2
      ds_bpermute_b32 v3, v2, v1
      ds_permute_b32 v4, v2, v1
      ds_bpermute_b32 v5, v2, v1 offset:8
      s_waitcnt lgkmcnt(0)"""
    pulled, pushed, shifted = assembly.run(text, architecture, [VALUES, order.astype(np.uint32)], ["v3", "v4", "v5"])
    np.testing.assert_array_equal(pulled, VALUES[order])
    np.testing.assert_array_equal(pushed[order], VALUES)
    np.testing.assert_array_equal(shifted, VALUES[(order + 2) % 64])


@marks.both_architectures
def test_bpermute_of_inactive_lanes_gives_zero(architecture):
    text = """
      v_lshlrev_b32_e32 v2, 2, v2
      s_mov_b64 exec, 0xffffffff
      ds_bpermute_b32 v3, v2, v1
      s_mov_b64 exec, -1
      s_waitcnt lgkmcnt(0)"""
    source = 63 - LANE
    inputs = [VALUES, source.astype(np.uint32), OLD]
    expected = np.where(LANE < 32, 0, OLD)
    np.testing.assert_array_equal(assembly.run(text, architecture, inputs, ["v3"])[0], expected)


SWIZZLES = {
    "swizzle(QUAD_PERM, 3, 1, 0, 2)": lambda i: i // 4 * 4 + [3, 1, 0, 2][i % 4],
    "swizzle(SWAP, 16)": lambda i: i ^ 16,
    "swizzle(REVERSE, 8)": lambda i: i // 8 * 8 + 7 - i % 8,
    "swizzle(BROADCAST, 4, 2)": lambda i: i // 4 * 4 + 2,
    'swizzle(BITMASK_PERM, "01pip")': lambda i: i // 32 * 32 + 8 + (i & 4) + (~i & 2) + (i & 1),
    str(31 | 4 << 10): lambda i: i ^ 4,
}


@marks.both_architectures
@pytest.mark.parametrize("pattern", SWIZZLES)
def test_swizzle(architecture, pattern):
    text = f"ds_swizzle_b32 v2, v1 offset:{pattern}\ns_waitcnt lgkmcnt(0)"
    expected = [VALUES[SWIZZLES[pattern](i)] for i in range(64)]
    np.testing.assert_array_equal(assembly.run(text, architecture, [VALUES], ["v2"])[0], expected)


@marks.both_architectures
def test_lanes_and_scalars(architecture):
    text = """
      s_mov_b64 exec, 0xfff0
      v_readfirstlane_b32 s10, v1
      s_mov_b64 exec, -1
      v_readlane_b32 s11, v1, 9
      s_movk_i32 s12, 40
      v_readlane_b32 s13, v1, s12
      s_add_i32 s10, s10, s11
      s_add_i32 s10, s10, s13
      v_mov_b32_e32 v2, s10
      v_mov_b32_e32 v3, 0
      v_writelane_b32 v3, s11, 5
      v_mbcnt_lo_u32_b32 v4, -1, 0
      v_mbcnt_hi_u32_b32 v4, -1, v4"""
    total, written, counted = assembly.run(text, architecture, [VALUES], ["v2", "v3", "v4"])
    assert set(total) == {VALUES[4] + VALUES[9] + VALUES[40]}
    np.testing.assert_array_equal(written, np.where(LANE == 5, VALUES[9], 0))
    np.testing.assert_array_equal(counted, LANE)


@pytest.mark.parametrize("group", [16, 32])
def test_swap_of_lane_groups(group):
    """Odd groups of the first register change places with even groups of the second: gfx950 alone has it."""
    text = f"v_permlane{group}_swap_b32_e32 v1, v2"
    first, second = assembly.run(text, "gfx950", [VALUES, OLD], ["v1", "v2"])
    odd = LANE // group % 2 == 1
    np.testing.assert_array_equal(first, np.where(odd, OLD[LANE - group * odd], VALUES))
    np.testing.assert_array_equal(second, np.where(odd, OLD, VALUES[(LANE + group) % 64]))
