"""What the emulator refuses and reports: races, missing waits, accesses out of bounds, unknown code, launches."""

import re
import struct

import numpy as np
import pytest
from gfx9 import EmulatorError, Memory, Program, UnknownInstruction, assembly, compile_assembly, marks

pytestmark = marks.needs_llvm
LANE = np.arange(64, dtype=np.uint32)
ADDRESS = "v_lshlrev_b32_e32 v40, 2, v0\n"


def refused(text: str, match: str, *, architecture="gfx950", inputs=(LANE,), lds=1024, **checks):
    with pytest.raises(EmulatorError, match=match):
        assembly.run(text, architecture, inputs, ["v50"], lds=lds, **checks)


def two_waves(text: str, architecture="gfx950", *, lds=1024, **checks) -> None:
    """Runs text on two waves. v0 is the thread, s8 the wave, v40 the lane, and behind ADDRESS four times it."""
    body = f"v_lshrrev_b32_e32 v1, 6, v0\nv_readfirstlane_b32 s8, v1\nv_and_b32_e32 v40, 63, v0\n{text}"
    body = body.replace("ADDRESS", "v_lshlrev_b32_e32 v40, 2, v40")
    program = Program(compile_assembly(body, architecture, lds=lds), architecture)
    program.launch("kernel", (1, 1, 1), (128, 1, 1), b"", memory=Memory(), **checks)


# ---- Missing waits


@pytest.mark.parametrize(
    "text, register, counter",
    [
        ("global_load_dword v50, v95, s[4:5]\nv_add_u32_e32 v51, v50, v0", "v50", "vmcnt"),
        ("global_load_dwordx2 v[50:51], v95, s[4:5]\nv_mov_b32_e32 v51, 0", "v51", "vmcnt"),
        ("global_load_dword a3, v95, s[4:5]\nv_accvgpr_read_b32 v50, a3", "a3", "vmcnt"),
        ("ds_write_b32 v95, v0\nds_read_b32 v50, v95\nv_mov_b32_e32 v51, v50", "v50", "lgkmcnt"),
        ("ds_bpermute_b32 v50, v95, v1\nv_mov_b32_e32 v51, v50", "v50", "lgkmcnt"),
        ("s_load_dword s20, s[4:5], 0x0\ns_add_i32 s21, s20, 1", "s20", "lgkmcnt"),
        ("s_load_dwordx2 s[20:21], s[4:5], 0x0\nv_add_u32_e32 v50, s21, v0", "s21", "lgkmcnt"),
        ("s_load_dwordx2 vcc, s[4:5], 0x0\nv_cndmask_b32_e32 v50, v0, v1, vcc", "s106", "lgkmcnt"),
        ("global_load_dword v50, v95, s[4:5]\nds_read_b32 v50, v95", "v50", "vmcnt"),
        ("v_mov_b32_e32 v60, 0\nglobal_atomic_add v50, v95, v60, s[6:7] sc0\nv_mov_b32_e32 v51, v50", "v50", "vmcnt"),
        # Order: the second of two loads may still be outstanding after vmcnt(1).
        (
            "global_load_dword v50, v95, s[4:5]\nglobal_load_dword v51, v95, s[4:5]\ns_waitcnt vmcnt(1)\n"
            "v_mov_b32_e32 v52, v50\nv_mov_b32_e32 v52, v51",
            "v51",
            "vmcnt",
        ),
        # Scalar loads end in any order: only lgkmcnt(0) tells of them.
        (
            "s_load_dword s20, s[4:5], 0x0\ns_load_dword s21, s[4:5], 0x4\ns_waitcnt lgkmcnt(1)\ns_mov_b32 s22, s20",
            "s20",
            "lgkmcnt",
        ),
        # FLAT counts in both.
        (
            "v_mov_b32_e32 v52, s4\nv_mov_b32_e32 v53, s5\nflat_load_dword v50, v[52:53]\ns_waitcnt vmcnt(0)\n"
            "v_mov_b32_e32 v51, v50",
            "v50",
            "lgkmcnt",
        ),
        ("ds_write_b32 v95, v0\nds_read_b32 v50, v95\ns_waitcnt vmcnt(0)\nv_mov_b32_e32 v51, v50", "v50", "lgkmcnt"),
    ],
)
@marks.both_architectures
def test_a_missing_wait_names_register_and_counter(architecture, text, register, counter):
    refused(text, rf"missing wait: {register} is .*{counter}", architecture=architecture, inputs=[LANE, LANE])


@marks.both_architectures
def test_waits_that_suffice(architecture):
    """Loads end in order, stores count among them, and LDS operations do not wait for scalar loads."""
    text = """
      global_load_dword v50, v95, s[4:5]
      global_load_dword v51, v95, s[4:5] offset:256
      global_store_dword v95, v0, s[6:7]
      s_waitcnt vmcnt(2)
      v_mov_b32_e32 v52, v50
      s_waitcnt vmcnt(1)
      v_add_u32_e32 v52, v52, v51
      ds_write_b32 v95, v52
      ds_read_b32 v53, v95
      s_waitcnt lgkmcnt(0)
      s_load_dword s20, s[4:5], 0x0
      ds_read_b32 v54, v95
      ds_read_b32 v55, v95
      s_waitcnt lgkmcnt(1)
      v_mov_b32_e32 v50, v54
      s_waitcnt lgkmcnt(0)"""
    got = assembly.run(text, architecture, [LANE, LANE + 5], ["v50"], lds=1024)
    np.testing.assert_array_equal(got[0], 2 * LANE + 5)


def test_waits_can_be_left_unchecked():
    text = "global_load_dword v50, v95, s[4:5]\nv_mov_b32_e32 v51, v50"
    assembly.run(text, "gfx950", [LANE], ["v51"], check_waits=False)


# ---- LDS

WRITE = "ADDRESS\nds_write_b32 v40, v0\ns_waitcnt lgkmcnt(0)\n"
READ_OTHER = "v_sub_u32_e32 v41, 252, v40\nds_read_b32 v50, v41\ns_waitcnt lgkmcnt(0)\n"


@marks.both_architectures
@pytest.mark.parametrize("order", ["forward", "backward", "interleaved"])
def test_race_of_a_write_and_a_read(architecture, order):
    """Wave 0 writes, wave 1 reads, and no barrier stands between."""
    text = "ADDRESS\ns_cmp_eq_u32 s8, 1\ns_cbranch_scc1 3\nds_write_b32 v40, v0\ns_waitcnt lgkmcnt(0)\n" + READ_OTHER
    with pytest.raises(EmulatorError, match=r"LDS race: wave \d (reads|writes) byte \d+, (written|read) by"):
        two_waves(text, architecture, order=order)


def test_race_of_two_writes():
    with pytest.raises(EmulatorError, match="LDS race: wave 1 writes byte 0, written by wave 0"):
        two_waves(WRITE)


@pytest.mark.parametrize("order", ["forward", "backward", "interleaved"])
def test_a_barrier_ends_the_race(order):
    """Each wave has its own 256 bytes, and reads the other's behind the barrier."""
    text = """
      v_lshlrev_b32_e32 v40, 2, v0
      ds_write_b32 v40, v0
      s_waitcnt lgkmcnt(0)
      s_barrier
      v_xor_b32_e32 v41, 0x100, v40
      ds_read_b32 v50, v41
      s_waitcnt lgkmcnt(0)"""
    two_waves(text, order=order)


@pytest.mark.parametrize("operation", ["ds_write_b32 v40, v0", "ds_read_b32 v50, v40"])
def test_an_access_that_a_barrier_does_not_wait_for(operation):
    """A wave that reaches the barrier with an LDS access outstanding may make it after the barrier."""
    text = f"""
      v_lshlrev_b32_e32 v40, 2, v0
      {operation}
      s_barrier
      v_xor_b32_e32 v41, 0x100, v40
      ds_write_b32 v41, v0
      s_waitcnt lgkmcnt(0)"""
    with pytest.raises(EmulatorError, match="LDS race"):
        two_waves(text)
    two_waves(text.replace("s_barrier", "s_waitcnt lgkmcnt(0)\ns_barrier"))


def test_a_race_can_be_left_unchecked():
    two_waves(WRITE, check_races=False)


@marks.both_architectures
@pytest.mark.parametrize("offset", [1021, 65532])
def test_lds_bounds(architecture, offset):
    refused(f"{ADDRESS}ds_read_b32 v50, v40 offset:{offset}", "out of bounds: LDS bytes", architecture=architecture)


@marks.both_architectures
def test_data_loaded_into_lds_before_its_wait(architecture):
    text = """
      s_mov_b32 m0, 0
      global_load_lds_dword v95, s[4:5]
      ds_read_b32 v50, v95
      s_waitcnt vmcnt(0) lgkmcnt(0)"""
    refused(text, "missing wait: LDS byte 0 is the result of a load to LDS", architecture=architecture)
    got = assembly.run(text.replace("ds_read", "s_waitcnt vmcnt(0)\nds_read"), architecture, [LANE], ["v50"], lds=256)
    np.testing.assert_array_equal(got[0], LANE)


def test_data_loaded_into_lds_behind_a_barrier_alone():
    """A barrier does not wait for the loads of the other wave."""
    memory, program = Memory(), {}
    for wait in ("", "s_waitcnt vmcnt(0)"):
        body = f"""
          s_load_dwordx2 s[4:5], s[0:1], 0x0
          v_and_b32_e32 v40, 63, v0
          v_lshlrev_b32_e32 v40, 2, v40
          v_lshrrev_b32_e32 v1, 6, v0
          v_readfirstlane_b32 s8, v1
          s_lshl_b32 m0, s8, 8
          s_waitcnt lgkmcnt(0)
          global_load_lds_dword v40, s[4:5]
          {wait}
          s_barrier
          s_xor_b32 s9, s8, 1
          s_lshl_b32 s9, s9, 8
          v_add_u32_e32 v41, s9, v40
          ds_read_b32 v50, v41
          s_waitcnt vmcnt(0) lgkmcnt(0)"""
        program[wait] = Program(compile_assembly(body, "gfx950", lds=512), "gfx950")
    arguments = struct.pack("<Q", memory.allocate(LANE))
    with pytest.raises(EmulatorError, match="missing wait: LDS byte"):
        program[""].launch("kernel", (1, 1, 1), (128, 1, 1), arguments, memory=memory)
    program["s_waitcnt vmcnt(0)"].launch("kernel", (1, 1, 1), (128, 1, 1), arguments, memory=memory)


# ---- Global memory


@marks.both_architectures
@pytest.mark.parametrize(
    "text",
    [
        "global_load_dword v50, v95, s[4:5] offset:4",
        "global_load_dwordx4 v[50:53], v95, s[4:5]",
        "global_load_dword v50, v95, s[4:5] offset:-4",
        "global_store_dword v95, v0, s[6:7] offset:1",
        "global_store_byte v95, v0, s[6:7] offset:-1",
        "global_store_dword v95, v0, s[4:5]",
        "global_store_dword v95, v0, s[0:1]",
        "v_mov_b32_e32 v50, 0\nglobal_atomic_add v95, v50, s[6:7] offset:256",
        "s_load_dword s20, s[4:5], 0x100",
        "s_mov_b32 m0, 0\nglobal_load_lds_dword v95, s[4:5] offset:8",
        "v_mov_b32_e32 v50, 0\nv_mov_b32_e32 v51, 0\nflat_load_dword v52, v[50:51]",
    ],
)
def test_bounds_of_global_memory(architecture, text):
    """The first address past an allocation, the last before it, half an access in it, read-only ones, and null."""
    refused(text, r"out of bounds: lane \d+ (accesses|writes)", architecture=architecture, lds=2048)


def test_inactive_lanes_access_nothing():
    text = "s_mov_b64 exec, 0xff\nglobal_load_dword v50, v95, s[4:5] offset:224\ns_mov_b64 exec, -1\ns_waitcnt vmcnt(0)"
    got = assembly.run("v_mov_b32_e32 v50, 7\n" + text, "gfx950", [LANE], ["v50"])
    np.testing.assert_array_equal(got[0], np.where(LANE < 8, LANE + 56, 7))


def test_shared_arrays_are_used_in_place():
    body = """
      s_load_dwordx2 s[4:5], s[0:1], 0x0
      v_lshlrev_b32_e32 v1, 2, v0
      s_waitcnt lgkmcnt(0)
      global_store_dword v1, v0, s[4:5]"""
    program, memory, array = Program(compile_assembly(body, "gfx942"), "gfx942"), Memory(), np.full(64, 9, np.uint32)
    address = memory.share(array)
    program.launch("kernel", (1, 1, 1), (64, 1, 1), struct.pack("<Q", address), memory=memory)
    np.testing.assert_array_equal(array, LANE)
    memory.free(address)
    with pytest.raises(EmulatorError, match="out of bounds"):
        program.launch("kernel", (1, 1, 1), (64, 1, 1), struct.pack("<Q", address), memory=memory)
    with pytest.raises(ValueError, match="contiguous"):
        memory.share(array[::2])
    with pytest.raises(ValueError, match="256 bytes, 512 are asked for"):
        memory.read(memory.allocate(array), np.zeros(128, np.uint32))


# ---- Refusals


@pytest.mark.parametrize(
    "text",
    [
        "v_sin_f32_e32 v50, v0",
        "v_mov_b32_e32 v50, src_private_base",
        "v_cmp_lt_f32_sdwa vcc, v0, v1 src0_sel:WORD_1 src1_sel:DWORD\nv_sin_f32_e32 v50, v0",
        "v_smfmac_f32_16x16x32_f16 a[0:3], v[2:3], v[4:7], v8",
        "v_mfma_f32_32x32x1_2b_f32 a[0:31], v0, v1, 0 cbsz:1",
        "s_getreg_b32 s20, hwreg(HW_REG_HW_ID)",
        "buffer_load_dword v50, v0, s[4:7], 0 offen",
        "s_cbranch_execz 2000",
    ],
)
def test_unknown_instructions_are_refused_before_the_launch(text):
    refused(text, re.escape(text.splitlines()[-1].split()[0].removesuffix("_e32")), inputs=[LANE] * 8)


def test_an_unknown_instruction_that_is_never_reached():
    body = "s_branch 1\nv_sin_f32_e32 v1, v0\ns_nop 0"
    Program(compile_assembly(body, "gfx950"), "gfx950").launch("kernel", (1, 1, 1), (64, 1, 1), b"", memory=Memory())
    reached = Program(compile_assembly(body.replace("s_branch", "s_cbranch_scc0"), "gfx950"), "gfx950")
    with pytest.raises(UnknownInstruction, match=r"kernel on gfx950: v_sin_f32_e32 v1, v0"):
        reached.launch("kernel", (1, 1, 1), (64, 1, 1), b"", memory=Memory())


@pytest.mark.parametrize(
    "text, match",
    [
        ("s_trap 2", "s_trap"),
        ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0", "rounding or denormal mode"),
        ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\nv_cvt_f16_f32_e32 v50, v1", "16-bit float result"),
        ("v_add_u32_e64 v50, v1, v0 clamp", "clamping an integer"),
        ("s_mov_b64 exec, 1\nds_read_b64_tr_b16 v[50:51], v95", "transposing read with inactive lanes"),
        ("s_mov_b64 exec, 1\nv_permlane32_swap_b32_e32 v50, v51", "swap of lanes with inactive lanes"),
        ("v_pk_add_f32 v[50:51], v[2:3], 1.0", "upper half of a constant pair"),
    ],
)
def test_what_is_not_modelled_stops_the_launch(text, match):
    refused(text, match, inputs=[LANE] * 3)


def kernel(**options) -> Program:
    return Program(compile_assembly("s_nop 0", "gfx950", **options), "gfx950")


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"block": (0, 1, 1)}, "0 threads a workgroup"),
        ({"block": (64, 32, 1)}, "2048 threads a workgroup, it takes 1 to 1024"),
        ({"grid": (1, 0, 1)}, r"a grid of \(1, 0, 1\) workgroups"),
        ({"dynamic_lds": 160 << 10}, "163904 bytes of LDS, there are 163840"),
        ({"kernarg": bytes(65)}, "65 bytes of arguments, it takes 64"),
        ({"name": "other"}, r"no kernel other; the code object has \['kernel'\]"),
    ],
)
def test_launches_that_are_refused(arguments, match):
    call = {"name": "kernel", "grid": (1, 1, 1), "block": (64, 1, 1), "kernarg": b"", "memory": Memory()} | arguments
    with pytest.raises(EmulatorError, match=match):
        kernel(lds=64).launch(**call)


def test_an_endless_loop_ends():
    program = Program(compile_assembly("s_branch 65535", "gfx950"), "gfx950")
    with pytest.raises(EmulatorError, match="limit of instructions"):
        program.launch("kernel", (1, 1, 1), (64, 1, 1), b"", memory=Memory(), instruction_limit=1000)


def test_code_objects_that_are_refused(tmp_path):
    data = compile_assembly("s_nop 0", "gfx950")
    with pytest.raises(EmulatorError, match="is for amdgcn-amd-amdhsa--gfx950, not gfx942"):
        Program(data, "gfx942")
    with pytest.raises(EmulatorError, match="64-bit ELF"):
        Program(b"__CLANG_OFFLOAD_BUNDLE__", "gfx950")
    with pytest.raises(ValueError, match="gfx90a"):
        Program(data, "gfx90a")
    path = tmp_path / "k.co"
    path.write_bytes(data)
    assert list(Program(path, "gfx950").kernels) == ["kernel"]
