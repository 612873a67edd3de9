"""What a tile costs a compute unit: a model of cycles over the instructions that the emulator counted.

It gives bounds, not times: latency, bank conflicts and misses are left out. Assumptions and where they come from:

- A compute unit has four SIMDs. Each takes one instruction of a wave every 4 cycles: a vector instruction passes 64
  lanes through 16 ("Compute unit" and "Pipeline descriptions" of the ROCm Compute Profiler's documentation).
- Transcendental instructions and conversions of floats take 16 cycles: LLVM's scheduling model of gfx942 and gfx950,
  which `llvm-mca` prints. In it all other vector instructions take one turn of 4 cycles. So do the scaling conversions
  of gfx950 (`v_cvt_scalef32_*`), which are counted here as the other conversions are.
- Matrix instructions take what the column "Cycles" of table 28 in the CDNA4 guide (7.1.2) says. LLVM's model has the
  same numbers for both architectures, but for 8-bit operands of f8f6f4, where it has half of the guide's.
- Nothing overlaps within a SIMD: its instructions of all kinds are added up, matrix instructions with all their
  cycles. Hardware can issue others meanwhile, so this is the most that issuing may take. The waves of a workgroup are
  spread evenly over the SIMDs.
- LDS moves 128 bytes a cycle for the whole compute unit (CDNA3 white paper); gfx950 is said to read 256 (Chips and
  Cheese, "AMD's CDNA 4 architecture announcement"). Conflicts are not counted.
- HBM: the device's bandwidth, divided by its compute units and its highest clock (datasheets).
- Waves in flight: 512 vector registers a lane and SIMD in blocks of 8, 800 scalar ones in blocks of 16, at most 8 waves
  a SIMD, and LDS ("Kernel Descriptor" in LLVM's AMDGPU guide).
"""

import dataclasses
import re

from . import mfma
from .code_object import Kernel
from .launch import LDS_BYTES, Execution, Program

SIMDS = 4
LDS_WRITES = 128  # bytes a cycle
_MOST_WAVES = 8  # of a SIMD
_TURN = 4  # cycles
_QUARTER_RATE = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_|v_cvt_(?!pk_bf16_f32|pkrtz)")
_LANES_BYTES = 256  # that a move between lanes takes of LDS' paths


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A device: name, compute units, highest clock in Hz, HBM in bytes a second, LDS reads in bytes a cycle."""

    name: str
    compute_units: int
    clock: float
    bandwidth: float
    lds_reads: int

    @property
    def bytes_a_cycle(self) -> float:
        """One compute unit's share of HBM."""
        return self.bandwidth / self.compute_units / self.clock


HARDWARE = {
    "gfx942": Hardware("MI300X", 304, 2.1e9, 5.3e12, 128),
    "gfx950": Hardware("MI355X", 256, 2.4e9, 8e12, 256),
}
CLASSES = ("matrix", "vector", "quarter rate", "LDS", "global load", "global store", "scalar", "other")


def class_of(mnemonic: str) -> str:
    """The class of an instruction; "other" are waits, barriers, branches and scalar loads."""
    if mnemonic.startswith("v_mfma_"):
        return "matrix"
    if mnemonic.startswith("v_"):
        return "quarter rate" if _QUARTER_RATE.match(mnemonic) else "vector"
    if mnemonic.startswith("ds_"):
        return "LDS"
    if mnemonic.startswith(("global_load_", "flat_load_")):
        return "global load"
    if mnemonic.startswith(("global_", "flat_")):
        return "global store"
    other = ("s_waitcnt", "s_nop", "s_barrier", "s_branch", "s_cbranch", "s_load", "s_endpgm", "s_sleep", "s_setprio")
    return "scalar" if mnemonic.startswith("s_") and not mnemonic.startswith(other) else "other"


def matrix_cycles(mnemonic: str) -> int:
    """Cycles of one matrix instruction."""
    shape = mfma.shape(mnemonic)
    if shape.rows == 4:
        return 8
    if shape.formats == "f32" or shape.blocks > 1 or shape.formats == "f8f6f4":  # 8-bit formats alone are emulated
        return 64 if shape.rows == 32 else 32
    return 32 if shape.rows == 32 else 16


def issue_cycles(text: str) -> int:
    """Cycles that an instruction, as the disassembler prints it, keeps its SIMD from the next one."""
    mnemonic, _, rest = text.partition(" ")
    kind = class_of(mnemonic)
    if kind == "matrix":
        return matrix_cycles(mnemonic)
    if kind == "quarter rate":
        return 4 * _TURN
    if mnemonic == "s_nop":
        return _TURN * (int(rest) + 1)
    return _TURN


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """Workgroups of a kernel that fit a compute unit, and what limits them."""

    workgroups: int
    waves_a_simd: float
    limit: str


def occupancy(kernel: Kernel, architecture: str, threads: int, dynamic_lds: int = 0) -> Occupancy:
    waves = -(-threads // 64)
    limits = {
        "waves": _MOST_WAVES,
        "vector registers": 512 // (-(-max(kernel.vgprs, 1) // 8) * 8),
        "scalar registers": 800 // (-(-max(kernel.sgprs, 1) // 16) * 16),
    }
    fit = {name: SIMDS * limit // waves for name, limit in limits.items()}
    lds = kernel.lds + dynamic_lds
    if lds:
        fit["LDS"] = LDS_BYTES[architecture] // lds
    limit = min(fit, key=fit.get)
    return Occupancy(fit[limit], fit[limit] * waves / SIMDS, limit)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one tile, in one workgroup: instructions by class over all waves, cycles of a SIMD or of the compute unit."""

    instructions: dict[str, float]
    matrix: float  # cycles of a SIMD
    vector: float  # likewise, quarter-rate ones included
    issue: float  # likewise, all kinds together
    lds: float  # cycles of the compute unit
    hbm: float  # cycles of the compute unit's share
    requested: float  # bytes that lanes load and store

    @property
    def hbm_share(self) -> float:
        """Of the compute unit's share of HBM, what issuing and LDS leave."""
        return self.hbm / max(self.issue, self.lds, self.hbm)

    @property
    def matrix_share(self) -> float:
        """Of the matrix units' peak rate, what issuing and LDS leave."""
        return self.matrix / max(self.issue, self.lds)


def cost(program: Program, threads: int, few: Execution, many: Execution, tiles: int, tile_bytes: int) -> Cost:
    """Of one of the `tiles` that `many` executed more than `few`; HBM moves `tile_bytes` for each."""
    hardware = HARDWARE[program.architecture]
    simds = min(SIMDS, -(-threads // 64))
    instructions = dict.fromkeys(CLASSES, 0.0)
    matrix = vector = issue = lds = 0.0
    for line, fewer, more in zip(program.lines, few.counts, many.counts, strict=True):
        count = (int(more) - int(fewer)) / tiles
        if count == 0:
            continue
        mnemonic = line.text.partition(" ")[0]
        kind, cycles = class_of(mnemonic), issue_cycles(line.text)
        instructions[kind] += count
        issue += count * cycles / simds
        if kind == "matrix":
            matrix += count * cycles / simds
        if kind in ("vector", "quarter rate"):
            vector += count * cycles / simds
        if mnemonic.startswith(("ds_bpermute", "ds_permute", "ds_swizzle")):
            lds += count * _LANES_BYTES / hardware.lds_reads

    def moved(field: str) -> float:
        return (getattr(many, field) - getattr(few, field)) / tiles

    lds += moved("lds_read") / hardware.lds_reads + moved("lds_written") / LDS_WRITES
    hbm = tile_bytes / hardware.bytes_a_cycle
    requested = moved("global_read") + moved("global_written")
    return Cost(instructions, matrix, vector, issue, lds, hbm, requested)
