"""Runs a few lines of assembly on one wave, for tests of single instructions."""

import struct

import numpy as np

from .compile import compile_assembly
from .launch import Program
from .memory import Memory

LANES = 64
_LOAD = "global_load_dword v{register}, v95, s[4:5] offset:{offset}"
_STORE = "global_store_dword v95, {register}, s[6:7] offset:{offset}"


def program(body: str, architecture: str, inputs: int, results: list[str], lds: int = 0) -> Program:
    """A kernel that loads `inputs` registers from v1 on, runs `body`, and stores the registers named in `results`.

    v0 is the lane. v95 and s[4:7] are taken.
    """
    lines = ["s_load_dwordx4 s[4:7], s[0:1], 0x0", "v_lshlrev_b32_e32 v95, 2, v0", "s_waitcnt lgkmcnt(0)"]
    lines += [_LOAD.format(register=1 + i, offset=256 * i % 4096) for i in range(min(inputs, 16))]
    for first in range(16, inputs, 16):  # offsets have 12 bits
        lines += ["v_add_u32_e32 v95, 0x1000, v95"]
        lines += [_LOAD.format(register=1 + i, offset=256 * i % 4096) for i in range(first, min(inputs, first + 16))]
    lines += ["s_waitcnt vmcnt(0)", "v_lshlrev_b32_e32 v95, 2, v0", body]
    for i, register in enumerate(results):
        lines += ["v_add_u32_e32 v95, 0x1000, v95"] if i and i % 16 == 0 else []
        lines += [_STORE.format(register=register, offset=256 * i % 4096)]
    return Program(compile_assembly("\n".join(lines), architecture, lds=lds, vgprs=96), architecture)


def run(body: str, architecture: str, inputs, results: list[str], *, lds: int = 0, **checks) -> np.ndarray:
    """Values of `results` [register][lane] as uint32, given those of the inputs [register][lane], of 32 bits each."""
    rows = [np.asarray(row) for row in inputs]
    if any(row.shape != (LANES,) or row.itemsize != 4 for row in rows):
        raise ValueError("each input is 64 values of 32 bits")
    words = np.array([row.view(np.uint32) for row in rows], np.uint32).reshape(-1, LANES)
    made = program(body, architecture, len(words), results, lds)
    memory = Memory()
    source = memory.allocate(words if len(words) else np.zeros(1, np.uint32), writable=False)
    poison = np.full((len(results), LANES), 0xDEADBEEF, np.uint32)
    target = memory.allocate(poison)
    arguments = struct.pack("<QQ", source, target)
    made.launch("kernel", (1, 1, 1), (LANES, 1, 1), arguments, memory=memory, **checks)
    return memory.read(target, poison)
