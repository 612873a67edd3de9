"""The core in C++, compiled when first used, and its structures (core/instruction.h, core/core.cc) in ctypes."""

import ctypes
import functools
import pathlib
import platform

from .compile import cached, run_compiler
from .tools import tool

_SOURCES = pathlib.Path(__file__).parent / "core"
# Contraction would fuse what the emulated program keeps apart.
_FLAGS = ["-std=c++20", "-O2", "-march=native", "-ffp-contract=off", "-fPIC", "-shared"]


class Operand(ctypes.Structure):
    NONE, VECTOR, SCALAR, CONSTANT, SCC = range(5)
    _fields_ = [
        ("kind", ctypes.c_uint8),
        ("negate", ctypes.c_uint8),
        ("absolute", ctypes.c_uint8),
        ("sign_extend", ctypes.c_uint8),
        ("select", ctypes.c_uint8),
        ("first", ctypes.c_uint16),
        ("count", ctypes.c_uint16),
        ("bits16", ctypes.c_uint16),
        ("bits32", ctypes.c_uint32),
        ("bits64", ctypes.c_uint64),
    ]


class MatrixLayout(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "columns", "depth", "blocks", "elements", "results")),
        *((name, ctypes.c_void_p) for name in ("a", "b", "d")),
        *((name, ctypes.c_int32) for name in ("a_format", "b_format", "scaled")),
    ]


class Instruction(ctypes.Structure):
    _fields_ = [
        ("run", ctypes.c_void_p),
        ("address", ctypes.c_uint64),
        ("operand", Operand * 6),
        ("operands", ctypes.c_int32),
        ("offset", ctypes.c_int32 * 2),
        ("target", ctypes.c_int32),
        ("immediate", ctypes.c_int32 * 3),
        *((name, ctypes.c_uint8 * 4) for name in ("op_sel", "op_sel_hi", "neg_lo", "neg_hi")),
        *(
            (name, ctypes.c_uint8)
            for name in (
                "clamp",
                "output_scale",
                "dpp",
                "bound_zero",
                "sdwa",
                "result_select",
                "result_unused",
                "returns",
            )
        ),
        ("lane_source", ctypes.c_uint8 * 64),
        ("lane_valid", ctypes.c_uint64),
        ("lane_enabled", ctypes.c_uint64),
        ("matrix", ctypes.POINTER(MatrixLayout)),
    ]


class Allocation(ctypes.Structure):
    _fields_ = [("base", ctypes.c_uint64), ("size", ctypes.c_uint64), ("writable", ctypes.c_uint32)]


class Traffic(ctypes.Structure):
    """Bytes of all active lanes."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("global_read", "global_written", "lds_read", "lds_written")]


class Launch(ctypes.Structure):
    _fields_ = [
        ("instructions", ctypes.POINTER(Instruction)),
        ("count", ctypes.c_int32),
        ("entry", ctypes.c_int32),
        ("architecture", ctypes.c_int32),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("lds_bytes", ctypes.c_uint32),
        ("mode", ctypes.c_uint32),
        ("user_scalars", ctypes.POINTER(ctypes.c_uint32)),
        ("user_scalar_count", ctypes.c_int32),
        ("wants_group_id", ctypes.c_int32 * 3),
        ("allocations", ctypes.POINTER(Allocation)),
        ("allocation_count", ctypes.c_int32),
        ("check_races", ctypes.c_int32),
        ("check_waits", ctypes.c_int32),
        ("order", ctypes.c_int32),
        ("instruction_limit", ctypes.c_int64),
        ("executed", ctypes.POINTER(ctypes.c_uint64)),
        ("traffic", Traffic),
        ("failed_instruction", ctypes.c_int32),
        ("failed_wave", ctypes.c_int32),
        ("failed_group", ctypes.c_uint32 * 3),
        ("message", ctypes.c_char * 512),
    ]


def _compile(path: pathlib.Path) -> None:
    run_compiler([tool("clang++"), *_FLAGS, *map(str, sorted(_SOURCES.glob("*.cc"))), "-o", str(path)])


@functools.cache
def library() -> ctypes.CDLL:
    sources = sorted(_SOURCES.iterdir())
    key = [tool("clang++"), platform.processor(), platform.node(), *_FLAGS]
    core = ctypes.CDLL(str(cached(".so", [*key, *(path.read_bytes() for path in sources)], _compile)))
    core.gfx9_handler.restype = ctypes.c_void_p
    core.gfx9_handler.argtypes = [ctypes.c_char_p]
    core.gfx9_run.argtypes = [ctypes.POINTER(Launch)]
    sizes = core.gfx9_size_of_instruction(), core.gfx9_size_of_launch()
    if sizes != (ctypes.sizeof(Instruction), ctypes.sizeof(Launch)):
        raise RuntimeError(f"core.py and the core disagree about their structures: {sizes}")
    return core


@functools.cache
def handler(name: str) -> int | None:
    """The address of the function that executes an instruction; None for one that is not known."""
    return library().gfx9_handler(name.encode())
