"""A code object: an ELF file with machine code, a descriptor of 64 bytes for each kernel, and metadata.

Sources: the ELF format; "AMDGPU Code Object" and "Kernel Descriptor" in LLVM's User Guide for the AMDGPU Backend.
"""

import dataclasses
import pathlib
import re
import struct
import subprocess
import tempfile

from .refusal import EmulatorError
from .tools import tool


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What descriptor and metadata say of a kernel. Sizes are in bytes, registers as allocated for one lane."""

    name: str
    entry: int  # address of the first instruction in the code object
    lds: int
    scratch: int
    kernarg: int
    vgprs: int  # accumulation registers included
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    max_workgroup: int
    mode: int  # the MODE register at the start: rounding and denormals
    user_sgprs: int
    kernarg_sgpr: int  # where the address of the arguments is put; -1: nowhere
    preload_sgpr: int  # where arguments are put themselves
    preload_count: int  # in words
    preload_offset: int
    workgroup_ids: tuple[bool, bool, bool]
    hidden: tuple[tuple[str, int], ...]  # implicit arguments: kind, offset


@dataclasses.dataclass(frozen=True)
class Line:
    """One instruction as the disassembler prints it."""

    address: int
    text: str


class CodeObject:
    """`data` is the file, or a path to it. `kernels` and `lines` are read from it by LLVM's tools."""

    def __init__(self, data: bytes | str | pathlib.Path, architecture: str):
        self.data = data if isinstance(data, bytes) else pathlib.Path(data).read_bytes()
        self.architecture = architecture
        self.image, self.symbols = _read_elf(self.data)
        with tempfile.NamedTemporaryFile(suffix=".co") as file:
            file.write(self.data)
            file.flush()
            notes = _output("llvm-readelf", "--notes", file.name)
            text = _output("llvm-objdump", "-d", f"--mcpu={architecture}", file.name)
        target = re.search(r"^amdhsa\.target:\s+'?(\S+?)'?$", notes, re.MULTILINE)
        if target is None or not target[1].partition(":")[0].endswith(f"--{architecture}"):
            raise EmulatorError(
                f"the code object is for {target[1] if target else 'no AMD target'}, not {architecture}"
            )
        self.lines = _read_lines(text)
        self.kernels = {entry[".name"]: self._kernel(entry) for entry in _read_metadata(notes)}

    def _kernel(self, entry: dict) -> Kernel:
        at = self.symbols[entry[".symbol"]]
        descriptor = self.image[at : at + 64]
        lds, scratch, kernarg = struct.unpack_from("<III", descriptor, 0)
        (entry_offset,) = struct.unpack_from("<q", descriptor, 16)
        rsrc1, rsrc2 = struct.unpack_from("<II", descriptor, 48)
        properties, preload = struct.unpack_from("<HH", descriptor, 56)
        # User registers come in a fixed order; a set bit of `properties` asks for each.
        position, kernarg_sgpr = 0, -1
        for bit, registers in enumerate((4, 2, 2, 2, 2, 2, 1)):
            if not properties >> bit & 1:
                continue
            if bit == 3:
                kernarg_sgpr = position
            position += registers
        preload_count, preload_offset = preload & 0x7F, preload >> 7
        return Kernel(
            name=entry[".name"],
            # A kernel with preloaded arguments begins with 256 bytes for firmware that cannot preload.
            entry=at + entry_offset + (256 if preload_count else 0),
            lds=lds,
            scratch=scratch,
            kernarg=kernarg,
            vgprs=entry[".vgpr_count"],
            agprs=entry.get(".agpr_count", 0),
            sgprs=entry[".sgpr_count"],
            vgpr_spills=entry.get(".vgpr_spill_count", 0),
            sgpr_spills=entry.get(".sgpr_spill_count", 0),
            max_workgroup=entry[".max_flat_workgroup_size"],
            mode=rsrc1 >> 12 & 0xFF,
            user_sgprs=rsrc2 >> 1 & 0x1F,
            kernarg_sgpr=kernarg_sgpr,
            preload_sgpr=position,
            preload_count=preload_count,
            preload_offset=preload_offset * 4,
            workgroup_ids=tuple(bool(rsrc2 >> bit & 1) for bit in (7, 8, 9)),
            hidden=tuple((kind, offset) for kind, offset in entry["args"] if kind.startswith("hidden_")),
        )


def _output(name: str, *arguments: str) -> str:
    done = subprocess.run([tool(name), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise EmulatorError(f"{name}: {done.stderr.strip()}")
    return done.stdout


def _read_elf(data: bytes) -> tuple[bytes, dict[str, int]]:
    """The loaded image, from address 0 on, and the symbols' addresses."""
    if data[:5] != b"\x7fELF\x02":
        raise EmulatorError("a code object is a 64-bit ELF file; a bundle has to be unpacked first")
    program_offset, section_offset = struct.unpack_from("<QQ", data, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", data, 54)
    segments = []
    for i in range(program_count):
        kind, _, offset, address, _, file_size, memory_size = struct.unpack_from(
            "<IIQQQQQ", data, program_offset + i * program_size
        )
        if kind == 1:  # PT_LOAD
            segments.append((offset, address, file_size, memory_size))
    image = bytearray(max(address + size for _, address, _, size in segments))
    for offset, address, file_size, _ in segments:
        image[address : address + file_size] = data[offset : offset + file_size]

    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, section_offset + i * section_size) for i in range(section_count)
    ]
    symbols = {}
    for _, kind, _, _, offset, size, link, _, _, entry_size in sections:
        if kind not in (2, 11):  # SHT_SYMTAB, SHT_DYNSYM
            continue
        names = sections[link][4]
        for at in range(offset, offset + size, entry_size):
            name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", data, at)
            start = names + name
            symbols[data[start : data.index(0, start)].decode()] = value
    return bytes(image), symbols


def _read_lines(text: str) -> list[Line]:
    lines = []
    for match in re.finditer(r"^\t(\S.*?)\s*// ([0-9A-F]+): ", text, re.MULTILINE):
        lines.append(Line(int(match[2], 16), " ".join(match[1].split())))
    return lines


def _read_metadata(notes: str) -> list[dict]:
    """Entries of amdhsa.kernels, from the YAML that llvm-readelf prints: scalars, and arguments as (kind, offset)."""
    kernels: list[dict] = []
    offset = 0
    for line in notes.splitlines():
        match = re.match(r"( *)(- )?( *)(\.\w+):\s*(.*)$", line)
        if not match:
            continue
        indent, key, value = len(match[1]) + len(match[2] or "") + len(match[3]), match[4], match[5].strip("'\" ")
        if indent == 4:
            if match[2]:
                kernels.append({"args": []})
            kernels[-1][key] = int(value) if re.fullmatch(r"-?\d+", value) else value
        elif key == ".offset":
            offset = int(value)
        elif key == ".value_kind":
            kernels[-1]["args"].append((value, offset))
    return kernels
