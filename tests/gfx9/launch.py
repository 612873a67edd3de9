"""A loaded program and its launches."""

import ctypes
import dataclasses
import pathlib
import struct

import numpy as np

from .code_object import CodeObject, Kernel
from .core import Instruction, Launch, Traffic, library
from .decode import decode
from .memory import Memory
from .refusal import EmulatorError, UnknownInstruction
from .tools import ARCHITECTURES

LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}
ORDERS = ("forward", "backward", "interleaved")
_MODE = 0xF0  # round to nearest, keep subnormal numbers: the only mode that is modelled


@dataclasses.dataclass(frozen=True)
class Execution:
    """What a launch did. `counts` [instruction] is how often a wave executed each; `program.lines` has their text."""

    counts: np.ndarray
    global_read: int  # bytes of all active lanes
    global_written: int
    lds_read: int
    lds_written: int

    @property
    def instructions(self) -> int:
        return int(self.counts.sum())


class Program:
    """A code object, a file or its bytes. What a kernel may execute is decoded when it is first launched."""

    def __init__(self, code_object: bytes | str | pathlib.Path, architecture: str):
        if architecture not in ARCHITECTURES:
            raise ValueError(f"architecture is {architecture!r}, not one of {ARCHITECTURES}")
        self.architecture = architecture
        self.code_object = CodeObject(code_object, architecture)
        self.kernels = self.code_object.kernels
        self.lines = self.code_object.lines
        self._image = np.frombuffer(bytearray(self.code_object.image), np.uint8)
        self._index = {line.address: i for i, line in enumerate(self.lines)}
        self._records = (Instruction * max(len(self.lines), 1))()
        self._decoded: set[int] = set()
        self._checked: set[str] = set()

    def reachable(self, name: str) -> list[int]:
        """The instructions that a kernel may execute, by its branches, decoded; an unknown one is refused."""
        found: set[int] = set()
        unknown: dict[str, str] = {}
        todo = [self._index[self.kernels[name].entry]]
        while todo:
            i = todo.pop()
            while i is not None and i < len(self.lines) and i not in found:
                found.add(i)
                try:
                    target = self._decode(i)
                except UnknownInstruction as error:
                    text = self.lines[i].text
                    unknown.setdefault(text.partition(" ")[0], text if str(error) == text else f"{text} ({error})")
                    target = -1
                if target >= 0:
                    todo.append(target)
                i = i + 1 if self.lines[i].text.partition(" ")[0] not in ("s_endpgm", "s_branch") else None
        if unknown:
            raise UnknownInstruction(f"{name} on {self.architecture}: {'; '.join(unknown.values())}")
        return sorted(found)

    def _decode(self, i: int) -> int:
        """Fills in the record of an instruction; gives the target of a branch, else -1."""
        if i not in self._decoded:
            self._records[i] = decode(self.lines[i], self._index)
            self._records[i].address += self._image.ctypes.data
            self._decoded.add(i)
        return self._records[i].target

    def check(self, name: str) -> Kernel:
        """The kernel, after a look at all that it may execute: what is not known is refused before anything runs."""
        if name not in self.kernels:
            raise EmulatorError(f"there is no kernel {name}; the code object has {sorted(self.kernels)}")
        kernel = self.kernels[name]
        if name in self._checked:
            return kernel
        self.reachable(name)
        if kernel.scratch:
            raise EmulatorError(f"{name} uses {kernel.scratch} bytes of scratch a thread, which is not modelled")
        if kernel.mode != _MODE:
            raise EmulatorError(f"{name} asks for MODE {kernel.mode:#x}: only {_MODE:#x} is modelled")
        self._checked.add(name)
        return kernel

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        kernarg: bytes,
        *,
        memory: Memory,
        dynamic_lds: int = 0,
        check_races: bool = True,
        check_waits: bool = True,
        order: str = "forward",
        instruction_limit: int = 1 << 40,
    ) -> Execution:
        """Runs a kernel: `grid` in workgroups, `block` in threads, `kernarg` the explicit arguments as in memory.

        Workgroups run one after another. The waves of one run to their next barrier in turn, from the first
        (`order="forward"`) or from the last ("backward"), or take turns of a few instructions ("interleaved").
        """
        kernel = self.check(name)
        self._check_shape(kernel, grid, block, dynamic_lds)
        arguments = np.frombuffer(bytearray(self._kernarg(kernel, grid, block, kernarg, dynamic_lds)), np.uint8)
        scalars = self._user_scalars(kernel, arguments)
        counts = np.zeros(len(self.lines), np.uint64)
        allocations = memory.records(
            (arguments.ctypes.data, arguments.nbytes, False), (self._image.ctypes.data, self._image.nbytes, False)
        )
        launch = Launch(
            instructions=self._records,
            count=len(self.lines),
            entry=self._index[kernel.entry],
            architecture=ARCHITECTURES.index(self.architecture),
            grid=tuple(grid),
            block=tuple(block),
            lds_bytes=kernel.lds + dynamic_lds,
            mode=kernel.mode,
            user_scalars=scalars.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32)),
            user_scalar_count=len(scalars),
            wants_group_id=kernel.workgroup_ids,
            allocations=allocations,
            allocation_count=len(allocations),
            check_races=check_races,
            check_waits=check_waits,
            order=ORDERS.index(order),
            instruction_limit=instruction_limit,
            executed=counts.ctypes.data_as(ctypes.POINTER(ctypes.c_uint64)),
        )
        if library().gfx9_run(ctypes.byref(launch)):
            raise self._failure(kernel, launch)
        traffic = {field: getattr(launch.traffic, field) for field, _ in Traffic._fields_}
        return Execution(counts, **traffic)

    def _check_shape(self, kernel: Kernel, grid, block, dynamic_lds: int) -> None:
        threads = block[0] * block[1] * block[2]
        if not 1 <= threads <= kernel.max_workgroup:
            raise EmulatorError(f"{kernel.name}: {threads} threads a workgroup, it takes 1 to {kernel.max_workgroup}")
        if min(grid) < 1:
            raise EmulatorError(f"{kernel.name}: a grid of {tuple(grid)} workgroups")
        limit = LDS_BYTES[self.architecture]
        if kernel.lds + dynamic_lds > limit:
            raise EmulatorError(f"{kernel.name}: {kernel.lds + dynamic_lds} bytes of LDS, there are {limit}")

    @staticmethod
    def _kernarg(kernel: Kernel, grid, block, kernarg: bytes, dynamic_lds: int) -> bytes:
        """Explicit arguments, and the implicit ones where the kernel has them."""
        explicit = min((offset for _, offset in kernel.hidden), default=kernel.kernarg)
        if len(kernarg) > explicit:
            raise EmulatorError(f"{kernel.name}: {len(kernarg)} bytes of arguments, it takes {explicit}")
        buffer = bytearray(kernarg.ljust(kernel.kernarg, b"\0"))
        values = {"hidden_grid_dims": ("<H", 3), "hidden_dynamic_lds_size": ("<I", dynamic_lds)}
        for axis, count, size in zip("xyz", grid, block, strict=True):
            values[f"hidden_block_count_{axis}"] = ("<I", count)
            values[f"hidden_group_size_{axis}"] = ("<H", size)
            values[f"hidden_remainder_{axis}"] = ("<H", 0)
            values[f"hidden_global_offset_{axis}"] = ("<Q", 0)
        for kind, offset in kernel.hidden:
            if kind in values:
                struct.pack_into(values[kind][0], buffer, offset, values[kind][1])
        # A load of several words may begin in the arguments and end behind them.
        return bytes(buffer) + bytes(64)

    @staticmethod
    def _user_scalars(kernel: Kernel, arguments: np.ndarray) -> np.ndarray:
        """The scalar registers that a wave starts with, before the workgroup's ids."""
        scalars = np.full(kernel.user_sgprs, 0xFFFFFFFF, np.uint32)
        if kernel.kernarg_sgpr >= 0:
            scalars[kernel.kernarg_sgpr : kernel.kernarg_sgpr + 2] = np.array([arguments.ctypes.data], np.uint64).view(
                np.uint32
            )
        words = arguments[kernel.preload_offset :][: 4 * kernel.preload_count].view(np.uint32)
        scalars[kernel.preload_sgpr : kernel.preload_sgpr + len(words)] = words
        return scalars

    def _failure(self, kernel: Kernel, launch: Launch) -> EmulatorError:
        message = launch.message.decode()
        i = launch.failed_instruction
        if i < 0:
            return EmulatorError(f"{kernel.name}: {message}")
        group = ", ".join(map(str, launch.failed_group))
        line = self.lines[i]
        return EmulatorError(
            f"{message} [{kernel.name} on {self.architecture}, workgroup ({group}), wave {launch.failed_wave}, "
            f"{line.address:#x}: {line.text}]"
        )
