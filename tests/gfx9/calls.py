"""What calls of the AMD kernels are put together from, beside the structs of params.py."""

import functools

import numpy as np

from .compile import ROOT, compile_hip
from .launch import Program
from .memory import Memory
from .params import DType

_BYTES = {DType.F32: 4, DType.BF16: 2, DType.F16: 2, DType.E4M3FN: 1, DType.E4M3FNUZ: 1}
_FLAGS = ("-mcode-object-version=5",)  # of kernels/rocm.cmake; the others are those of compile_hip


@functools.cache
def load(source: str, architecture: str) -> Program:
    """The code object of a source below kernels/."""
    return Program(compile_hip(ROOT / "kernels" / source, architecture, _FLAGS), architecture)


def element_bytes(dtype: DType) -> int:
    return _BYTES[dtype]


def zeros(memory: Memory, *shape: int, dtype=np.uint8) -> int:
    return memory.allocate(np.zeros(shape, dtype))


def numbers(memory: Memory, *values: int) -> int:
    return memory.allocate(np.array(values, np.int32))
