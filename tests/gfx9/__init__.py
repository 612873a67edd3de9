"""An emulator of gfx942 (CDNA3) and gfx950 (CDNA4) for tests: it executes the machine code of a code object.

    program = Program(compile_hip(source, "gfx950"), "gfx950")
    memory = Memory()
    address = memory.allocate(array)
    program.launch("kernel", grid, block, kernarg, memory=memory)

LLVM's disassembler decodes, `decode` turns its text into records, and a core in C++ (core/), compiled when first used,
executes them: 64 lanes in lock step, workgroup after workgroup. It refuses what it does not know, and reports accesses
out of bounds, races in LDS, and results of loads that are used before an `s_waitcnt`. README.md has what is modelled.
"""

from .code_object import CodeObject, Kernel
from .compile import compile_assembly, compile_hip
from .launch import Execution, Program
from .memory import Memory
from .refusal import EmulatorError, UnknownInstruction
from .tools import ARCHITECTURES, missing_tools

__all__ = [
    "ARCHITECTURES",
    "CodeObject",
    "EmulatorError",
    "Execution",
    "Kernel",
    "Memory",
    "Program",
    "UnknownInstruction",
    "compile_assembly",
    "compile_hip",
    "missing_tools",
]
