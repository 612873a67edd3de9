"""Which lane each lane reads: DPP controls and ds_swizzle patterns. Source: the ISA guides' sections on DPP and DS."""

import numpy as np

from .refusal import UnknownInstruction

_LANE = np.arange(64)
_ROW = _LANE & ~15
_COLUMN = _LANE & 15
DPP_CONTROLS = (
    "quad_perm",
    "row_shl",
    "row_shr",
    "row_ror",
    "row_mirror",
    "row_half_mirror",
    "row_newbcast",
    "row_bcast",
    "wave_shl",
    "wave_shr",
    "wave_rol",
    "wave_ror",
)


def _mask(lanes: np.ndarray) -> int:
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


def dpp(modifiers: dict) -> tuple[np.ndarray, int, int]:
    """The source of each lane, the lanes whose source exists, and the lanes that row and bank mask let be written."""
    control = next((name for name in DPP_CONTROLS if name in modifiers), None)
    if control is None:
        raise UnknownInstruction(f"the DPP control of {modifiers}")
    n = modifiers[control]
    valid = np.ones(64, bool)
    if control == "quad_perm":
        source = (_LANE & ~3) + np.array(n)[_LANE & 3]
    elif control == "row_shl":
        source, valid = _LANE + n, _COLUMN + n <= 15
    elif control == "row_shr":
        source, valid = _LANE - n, _COLUMN - n >= 0
    elif control == "row_ror":
        source = _ROW + ((_COLUMN - n) & 15)
    elif control == "row_mirror":
        source = _ROW + 15 - _COLUMN
    elif control == "row_half_mirror":
        source = (_LANE & ~7) + 7 - (_LANE & 7)
    elif control == "row_newbcast":
        source = _ROW + n
    elif control == "row_bcast" and n == 15:  # the last lane of each row, to the next row
        source, valid = _ROW - 1, _LANE >= 16
    elif control == "row_bcast":  # lane 31, to the upper two rows
        source, valid = np.full(64, 31), _LANE >= 32
    elif control == "wave_shl":
        source, valid = _LANE + 1, _LANE < 63
    elif control == "wave_shr":
        source, valid = _LANE - 1, _LANE >= 1
    elif control == "wave_rol":
        source = (_LANE + 1) & 63
    else:
        source = (_LANE - 1) & 63
    rows, banks = modifiers.get("row_mask", 15), modifiers.get("bank_mask", 15)
    enabled = ((rows >> (_LANE >> 4)) & (banks >> (_COLUMN >> 2)) & 1).astype(bool)
    return np.where(valid, source, 0), _mask(valid), _mask(enabled)


def swizzle(pattern: int | str) -> np.ndarray:
    """The source of each lane for ds_swizzle's offset, as a number or as the disassembler names it."""
    if isinstance(pattern, str):
        return _named_swizzle(pattern)
    if pattern & 0x8000:
        if pattern & 0x7F00:
            raise UnknownInstruction(f"the swizzle pattern {pattern:#x}")
        return (_LANE & ~3) + (pattern >> 2 * (_LANE & 3) & 3)
    keep, fill, flip = pattern & 31, pattern >> 5 & 31, pattern >> 10 & 31
    return (_LANE & 32) | ((_LANE & 31 & keep | fill) ^ flip)


def _named_swizzle(pattern: str) -> np.ndarray:
    kind, *arguments = pattern[len("swizzle(") : -1].replace(" ", "").split(",")
    if kind == "QUAD_PERM":
        return (_LANE & ~3) + np.array([int(x) for x in arguments])[_LANE & 3]
    if kind == "SWAP":
        return _LANE ^ int(arguments[0])
    if kind == "REVERSE":
        return _LANE ^ (int(arguments[0]) - 1)
    if kind == "BROADCAST":
        return (_LANE & ~(int(arguments[0]) - 1)) + int(arguments[1])
    if kind == "BITMASK_PERM":  # a letter for each of 5 bits: 0, 1, p (kept), i (flipped)
        source = _LANE & 32
        for bit, letter in enumerate(reversed(arguments[0].strip('"'))):
            own = _LANE >> bit & 1
            source = source | {"0": 0 * own, "1": 0 * own + 1, "p": own, "i": 1 - own}[letter] << bit
        return source
    raise UnknownInstruction(f"the swizzle pattern {pattern}")
