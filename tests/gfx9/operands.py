"""Operands of an instruction, from the disassembler's text: registers, constants, and their modifiers.

Source: "Syntax of AMDGPU Instruction Operands" in LLVM's documentation; values of inline constants from the ISA guides.
"""

import functools
import re
import struct

import numpy as np

from .core import Operand
from .refusal import UnknownInstruction

_SPECIAL = {  # name: first register, count
    "flat_scratch": (102, 2),
    "xnack_mask": (104, 2),
    "vcc": (106, 2),
    "vcc_lo": (106, 1),
    "vcc_hi": (107, 1),
    "m0": (124, 1),
    "exec": (126, 2),
    "exec_lo": (126, 1),
    "exec_hi": (127, 1),
}
# 1 / (2 * pi) is the one inline constant whose text is shortened.
_ONE_OVER_TWO_PI = {"0.15915494": 0x3E22F983, "0.15915494309189532": 0x3E22F983}
_SELECT = {"DWORD": 0, "BYTE_0": 1, "BYTE_1": 2, "BYTE_2": 3, "BYTE_3": 4, "WORD_0": 5, "WORD_1": 6}


def select_code(name: str) -> int:
    """The number of an SDWA selection."""
    return _SELECT[name]


def _bits(fmt: str, value: float) -> int:
    return int.from_bytes(struct.pack(f"<{fmt}", value), "little")


def _constant(bits16: int, bits32: int, bits64: int) -> Operand:
    mask = (1 << 64) - 1
    return Operand(
        kind=Operand.CONSTANT, bits16=bits16 & 0xFFFF, bits32=bits32 & 0xFFFFFFFF, bits64=bits64 & mask, count=1
    )


def _integer(value: int) -> Operand:
    return _constant(value, value, value)  # signed, as wide as the operand


def _literal(value: int, is_double: bool) -> Operand:
    """32 bits of the instruction: the upper half of a double, else as they are, zeros above."""
    value &= 0xFFFFFFFF
    return _constant(value, value, value << 32 if is_double else value)


def _float(text: str) -> Operand:
    if text.lstrip("-") in _ONE_OVER_TWO_PI:
        if text.startswith("-"):
            raise UnknownInstruction(f"the constant {text}")
        return _constant(0x3118, 0x3E22F983, 0x3FC45F306DC9C882)
    value = float(text)
    return _constant(int(np.float16(value).view(np.uint16)), _bits("f", value), _bits("d", value))


def _registers(kind: int, first: int, count: int) -> Operand:
    return Operand(kind=kind, first=first, count=count)


@functools.cache
def parse(text: str, is_double: bool = False) -> Operand:
    """An operand; `is_double` says how a 64-bit one reads a literal. The result is shared: copy before changing it."""
    for prefix, field in (("neg(", "negate"), ("sext(", "sign_extend"), ("abs(", "absolute")):
        if text.startswith(prefix):
            return _modified(text[len(prefix) : -1], is_double, field)
    if text.startswith("lit("):
        return parse(text[4:-1], is_double)
    if text.startswith("-") and not re.match(r"-[\d.]", text):
        return _modified(text[1:], is_double, "negate")
    if text.startswith("|"):
        return _modified(text[1:-1], is_double, "absolute")
    match = re.fullmatch(r"([vsa])(\d+)", text) or re.fullmatch(r"([vsa])\[(\d+):(\d+)\]", text)
    if match:
        first, last = int(match[2]), int(match[match.lastindex])
        if match[1] == "s":
            return _registers(Operand.SCALAR, first, last - first + 1)
        return _registers(Operand.VECTOR, first + (256 if match[1] == "a" else 0), last - first + 1)
    if text in _SPECIAL:
        return _registers(Operand.SCALAR, *_SPECIAL[text])
    if text in ("src_scc", "scc"):
        return Operand(kind=Operand.SCC, count=1)
    if text == "src_shared_base":
        return _constant(0, 0x00010000, 0x00010000 << 32)
    if text == "off":
        return Operand(kind=Operand.NONE)
    if re.fullmatch(r"-?\d+", text):
        return _integer(int(text))
    if re.fullmatch(r"-?0x[0-9a-f]+", text):
        return _literal(int(text, 16), is_double)
    if re.fullmatch(r"-?\d*\.\d+(e[-+]?\d+)?", text):
        return _float(text)
    raise UnknownInstruction(f"the operand {text}")


def _modified(text: str, is_double: bool, field: str) -> Operand:
    operand = Operand.from_buffer_copy(parse(text, is_double))
    setattr(operand, field, 1)
    return operand


def split(rest: str) -> tuple[list[str], dict[str, object]]:
    """The text behind the mnemonic as operands and modifiers: "v0, v1 offset:16 sc0" is v0, v1 and a dictionary."""
    parts, depth, current = [], 0, ""
    for character in rest:
        depth += (character in "[(") - (character in "])")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    if current.strip():
        parts.append(current.strip())
    modifiers: dict[str, object] = {}
    if parts:
        last, *tail = _words(parts[-1])
        parts[-1] = last
        if re.match(r"[a-z_0-9]+:", last):  # no operand at all, as in "buffer_inv sc1" or "ds_nop offset:4"
            parts.pop()
            tail = [last, *tail]
        for word in tail:
            key, _, value = word.partition(":")
            modifiers[key] = _value(value) if value else True
    return parts, modifiers


def _words(text: str) -> list[str]:
    """Splits at blanks outside parentheses and brackets."""
    words, depth, current = [], 0, ""
    for character in text:
        depth += (character in "[(") - (character in "])")
        if character == " " and depth == 0:
            words.append(current)
            current = ""
        else:
            current += character
    words.append(current)
    return [word for word in words if word]


def _value(text: str) -> object:
    if text.startswith("["):
        return [int(item, 0) for item in text[1:-1].split(",")]
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", text):
        return int(text, 0)
    return text
