"""The sample kernels (kernels/) as rows of the tables."""

import pathlib
import struct

import numpy as np

from .compile import compile_hip
from .launch import Execution, Program
from .memory import Memory
from .tables import Entry

KERNELS = pathlib.Path(__file__).parent / "kernels"


def load(name: str, architecture: str, *flags: str) -> Program:
    return Program(compile_hip(KERNELS / f"{name}.hip", architecture, flags), architecture)


def gemm_entry(architecture: str) -> Entry:
    """A tile is 32 values of k for 64 x 64 outputs: 64 rows of A and of B in bf16."""
    program = load("gemm", architecture)

    def run(tiles: int) -> Execution:
        memory, depth = Memory(), 32 * tiles
        inputs = [memory.allocate(np.zeros((64, depth), np.uint16)) for _ in range(2)]
        inputs += [memory.allocate(np.arange(4, dtype=np.int32)), memory.allocate(np.zeros((64, 64), np.float32))]
        return program.launch("gemm", (1, 1, 1), (256, 1, 1), struct.pack("<QQQQi", *inputs, depth), memory=memory)

    return Entry(program, "gemm", "64 x 64 outputs, 32 of k", 2 * 64 * 32 * 2, 256, run)
