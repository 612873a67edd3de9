"""LLVM's tools by name: release 22 first, else the newest on PATH, else ROCm's own."""

import functools
import os
import re
import shutil

ARCHITECTURES = ("gfx942", "gfx950")
_ROCM = "/opt/rocm/llvm/bin"


def _versions(name: str) -> list[str]:
    """Names like "clang-21" on PATH, the newest first."""
    found = set()
    for directory in os.get_exec_path():
        try:
            entries = os.listdir(directory)
        except OSError:
            continue
        found |= {entry for entry in entries if re.fullmatch(re.escape(name) + r"-\d+", entry)}
    return sorted(found, key=lambda entry: -int(entry.rpartition("-")[2]))


@functools.cache
def find(name: str) -> str | None:
    """The path of "clang", "clang++", "llvm-objdump" or "llvm-readelf"; None where there is none."""
    for candidate in (f"{name}-22", *_versions(name), name, f"{_ROCM}/{name}"):
        path = shutil.which(candidate)
        if path:
            return path
    return None


def tool(name: str) -> str:
    path = find(name)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed: the emulator needs LLVM 20 or newer")
    return path


def missing_tools() -> str:
    """The tools that are missing, as the reason to skip a test; empty if none is."""
    missing = [name for name in ("clang", "clang++", "ld.lld", "llvm-objdump", "llvm-readelf") if not find(name)]
    return f"not installed: {', '.join(missing)}" if missing else ""
