"""The prefill kernels as rows of the tables: a tile is a block of keys and values that all of a workgroup's rows see."""

import pathlib
import struct

import numpy as np

from .compile import ROOT, compile_hip
from .launch import Execution, Program
from .memory import Memory
from .tables import Entry

KERNELS = pathlib.Path("kernels/prefill")
_PARAMS = "@PPPqqPPPPPPPPqiiiif??ii?iPq"  # PrefillParams of kernels/params.h
_BF16, _F16, _E4M3FN = 1, 2, 3  # DType
_SCRATCH = 1 << 20  # bytes, more than a tile that is not cut needs


def load(stem: str, architecture: str) -> Program:
    return Program(compile_hip(ROOT / KERNELS / f"{stem}.hip", architecture, [f"-I{ROOT}"]), architecture)


def parameters(memory: Memory, queries: int, keys: int, dtype: int, out_dtype: int, element_bytes: int) -> bytes:
    """A call of one request and head, not causal, over zeros."""

    def zeros(columns: int, rows: int, size: int) -> int:
        return memory.allocate(np.zeros((rows, columns * size), np.uint8))

    def offsets(rows: int) -> int:
        return memory.allocate(np.array([0, rows], np.int32))

    arrays = [zeros(192, queries, element_bytes), zeros(192, keys, element_bytes), zeros(128, keys, element_bytes)]
    lengths = [offsets(queries), offsets(keys)]
    results = [zeros(128, queries, 2), zeros(1, queries, 4)]
    scratch = zeros(_SCRATCH, 1, 1)
    return struct.pack(
        _PARAMS, *arrays, 128, 0, *lengths, 0, 0, 0, 0, *results, keys, queries, 1, 1, 0, 192**-0.5, False, False,
        dtype, dtype, False, out_dtype, scratch, _SCRATCH,
    )  # fmt: skip


def _entry(program: Program, kernel: str, queries: int, keys: int, dtype: int, planner: Program | None = None) -> Entry:
    element_bytes = 1 if dtype == _E4M3FN else 2
    threads = queries // 32 * 64

    def run(tiles: int) -> Execution:
        memory = Memory()
        out_dtype = _BF16 if dtype == _E4M3FN else dtype
        kernarg = parameters(memory, queries, keys * tiles, dtype, out_dtype, element_bytes)
        if planner is not None:
            planner.launch(f"{kernel}_plan", (1, 1, 1), (64, 1, 1), kernarg, memory=memory)
        return program.launch(kernel, (1, 1, 1), (threads, 1, 1), kernarg, memory=memory)

    return Entry(program, kernel, f"{queries} queries, {keys} keys", keys * 320 * element_bytes, threads, run)


def prefill_entries() -> list[Entry]:
    entries = []
    for name, dtype in (("bf16", _BF16), ("f16", _F16)):
        for architecture, queries in (("gfx942", 256), ("gfx950", 128)):
            entries.append(_entry(load(f"gfx9/{name}", architecture), f"mla_prefill_{name}", queries, 64, dtype))
    planner = load("gfx950/plan", "gfx950")
    entries.append(_entry(load("gfx950/attention", "gfx950"), "mla_prefill_fp8", 256, 128, _E4M3FN, planner))
    return entries
