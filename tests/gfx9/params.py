"""The structs of kernels/params.h in ctypes, read from the header itself."""

import ctypes
import enum
import functools
import re

from .compile import ROOT

_SCALARS = {
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "bool": ctypes.c_bool,
    "DType": ctypes.c_int32,
}


class DType(enum.IntEnum):
    """As in kernels/params.h."""

    F32 = 0
    BF16 = 1
    F16 = 2
    E4M3FN = 3
    E4M3FNUZ = 4


@functools.cache
def _structs() -> dict[str, type[ctypes.Structure]]:
    text = re.sub(r"//.*", "", (ROOT / "kernels" / "params.h").read_text())
    found: dict[str, type[ctypes.Structure]] = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL):
        fields = []
        for declaration in filter(None, map(str.strip, body.split(";"))):
            match = re.fullmatch(r"(?:const )?(\w+)\s*(\*?)\s*(\w+)(?:\[(\d+)\])?(?: = .*)?", declaration)
            if not match:
                raise ValueError(f"kernels/params.h: {name} has a field of an unknown form: {declaration}")
            kind, pointer, field, count = match.groups()
            type_ = ctypes.c_uint64 if pointer else _SCALARS.get(kind) or found[kind]
            fields.append((field, type_ * int(count) if count else type_))
        found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return found


def struct(name: str) -> type[ctypes.Structure]:
    """A struct of the header, its pointers as addresses."""
    return _structs()[name]
