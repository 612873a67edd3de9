"""Register layouts of dense matrix instructions, and their names.

D (rows x columns) = A (rows x depth) * B (depth x columns) + C, for each of `blocks` independent products. Lane l
holds elements e of A and B and registers r of D:

- The lanes are dealt to rows (columns) first, then to blocks, then to groups of k.
- k: the n elements of a lane lie together, group after group; where 8-bit elements fill more than four registers, they
  lie in runs of 16, and runs are dealt to the groups in turn.
- D: 32 rows: row = 8 * (r // 4) + 4 * (l // 32) + r % 4, 16 registers a block. 16 rows: row = 4 * (l // 16) + r; with
  blocks, r % 4 and block r // 4. 4 rows: row = r, block l // 4. The column is l % columns.

Sources: AMD's matrix instruction calculator and the CDNA3 and CDNA4 guides' chapters on matrix instructions.
"""

import ctypes
import dataclasses
import functools
import re

import numpy as np

from .core import MatrixLayout
from .refusal import UnknownInstruction

FORMATS = ("f32", "f16", "bf16", "fp8", "bf8", "i8")  # as numbered in core/matrix.cc
_BITS = {"f32": 32, "f16": 16, "bf16": 16, "fp8": 8, "bf8": 8, "i8": 8}
_LANE = np.arange(64)[:, None]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A matrix instruction by its name, without the formats of f8f6f4, which are modifiers."""

    accumulator: str
    rows: int
    columns: int
    depth: int
    blocks: int
    formats: str
    scaled: bool


def shape(mnemonic: str) -> Shape:
    match = re.fullmatch(r"v_mfma_(scale_)?(f32|i32)_(\d+)x(\d+)x(\d+)_?(?:(\d+)b_)?(\w+?)(?:_1k)?", mnemonic)
    if not match:
        raise UnknownInstruction(mnemonic)
    rows, columns, depth, blocks = int(match[3]), int(match[4]), int(match[5]), int(match[6] or 1)
    return Shape(match[2], rows, columns, depth, blocks, match[7], bool(match[1]))


def formats(shape: Shape, modifiers: dict) -> tuple[str, str]:
    if shape.formats == "f8f6f4":
        names = {0: "fp8", 1: "bf8"}
        found = tuple(names.get(modifiers.get(key, 0)) for key in ("cbsz", "blgp"))
        if None in found:
            raise UnknownInstruction("matrix operands of 6 or 4 bits")
        return found
    if modifiers.get("cbsz") or modifiers.get("abid") or modifiers.get("blgp"):
        raise UnknownInstruction("broadcasts of a matrix instruction (cbsz, abid, blgp)")
    first, _, second = shape.formats.partition("_")
    if first not in _BITS or (second or first) not in _BITS:
        raise UnknownInstruction(f"the matrix format {shape.formats}")
    return first, second or first


def input_index(outer: int, depth: int, blocks: int, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each lane's elements [64, n]: the row of A (or column of B), k and the block."""
    groups = 64 // (outer * blocks)
    n = depth // groups
    element = np.arange(n)[None, :]
    group = _LANE // (outer * blocks)
    run = 16 if bits == 8 and n > 16 else n
    k = (element // run * groups + group) * run + element % run
    zero = np.zeros_like(k)
    return _LANE % outer + zero, k, _LANE // outer % blocks + zero


def output_index(rows: int, columns: int, blocks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each lane's registers [64, n]: the row, the column and the block of D."""
    r = np.arange(rows * columns * blocks // 64)[None, :]
    zero = np.zeros((64, r.shape[1]), int)
    column = _LANE % columns + zero
    if rows == 32:
        return 8 * (r % 16 // 4) + 4 * (_LANE // 32) + r % 4 + zero, column, r // 16 + zero
    if rows == 16:
        return 4 * (_LANE // 16) + r % 4 + zero, column, r // 4 + zero
    return r % 4 + zero, column, _LANE // 4 + zero


def _pointer(index: np.ndarray) -> tuple[np.ndarray, int]:
    kept = np.ascontiguousarray(index, np.uint16)
    return kept, kept.ctypes.data


_KEPT: list[np.ndarray] = []  # the core reads these through pointers


@functools.cache
def layout(shape: Shape, a_format: str, b_format: str) -> MatrixLayout:
    bits = _BITS[a_format]
    row, k, block = input_index(shape.rows, shape.depth, shape.blocks, bits)
    a, a_pointer = _pointer((block * shape.rows + row) * shape.depth + k)
    column, k, block = input_index(shape.columns, shape.depth, shape.blocks, bits)
    b, b_pointer = _pointer((block * shape.depth + k) * shape.columns + column)
    row, column, block = output_index(shape.rows, shape.columns, shape.blocks)
    d, d_pointer = _pointer((block * shape.rows + row) * shape.columns + column)
    _KEPT.extend((a, b, d))
    return MatrixLayout(
        rows=shape.rows,
        columns=shape.columns,
        depth=shape.depth,
        blocks=shape.blocks,
        elements=a.shape[1],
        results=d.shape[1],
        a=a_pointer,
        b=b_pointer,
        d=d_pointer,
        a_format=FORMATS.index(a_format),
        b_format=FORMATS.index(b_format),
        scaled=shape.scaled,
    )


def layout_pointer(shape: Shape, modifiers: dict):
    return ctypes.pointer(layout(shape, *formats(shape, modifiers)))
