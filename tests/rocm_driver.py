"""The ROCm driver (tests/native/rocm_driver.cc) in this process, on a HIP runtime: on a machine with an AMD GPU ROCm's,
else the stand-in, whose launches the emulator executes.

    cmake -S ffi -B build/rocm -DJAX_MLA_CUDA=OFF -DJAX_MLA_ROCM=ON
    cmake --build build/rocm --target mla_rocm_driver mla_hip_standin
    JAX_MLA_ROCM_DRIVER=build/rocm pytest tests/test_rocm.py
"""

import ctypes
import os
import pathlib

from gfx9 import EmulatorError, Memory, Program

FOLDER = pathlib.Path(os.environ["JAX_MLA_ROCM_DRIVER"]).absolute() if "JAX_MLA_ROCM_DRIVER" in os.environ else None
ARCHITECTURES = ("gfx942", "gfx950")  # of the stand-in's devices 0 and 1
COMPUTE_UNITS = 4  # few, so that the persistent grids are small

_LAUNCHER = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_size_t,
)
_LAUNCH_FAILURE = 719  # hipErrorLaunchFailure


class Driver:
    """The driver's library, and the stand-in's controls where that is the runtime."""

    def __init__(self, folder: pathlib.Path, *, real: bool = False):
        self.standin = None if real else ctypes.CDLL(str(folder / "libamdhip64.so.7"))
        self._library = ctypes.CDLL(str(folder / "libmla_rocm_driver.so"))
        self._library.mla_rocm_run.restype = ctypes.c_int64
        self._text = ctypes.create_string_buffer(1 << 16)
        self._programs: dict[bytes, Program] = {}
        self.order = "forward"
        self.launches: list[tuple[str, str, tuple[int, ...], tuple[int, ...], int]] = []
        self.failure: Exception | None = None
        if self.standin is not None:
            self.standin.standin_calls.restype = ctypes.c_int64
            self.standin.standin_allocations.restype = ctypes.c_size_t
            self._launcher = _LAUNCHER(self._launch)  # kept: the library holds the pointer alone
            self.standin.standin_set_launcher(self._launcher)
            for ordinal, architecture in enumerate(ARCHITECTURES):
                self.set_device(ordinal, f"{architecture}:sramecc+:xnack-")

    def set_device(self, ordinal: int, architecture: str) -> None:
        self.standin.standin_set_device(ordinal, architecture.encode(), COMPUTE_UNITS)

    def refuse(self, entry: str, status: int) -> None:
        self.standin.standin_refuse(entry.encode(), status)

    def calls(self, entry: str) -> int:
        return self.standin.standin_calls(entry.encode())

    def run(self, group: str, ordinal: int, *, quick: bool) -> tuple[int, str]:
        """How many checks a group made, and the text of those that failed."""
        self.failure = None
        self._text.value = b""
        checks = self._library.mla_rocm_run(
            group.encode(), ordinal, ctypes.c_bool(quick), self._text, ctypes.c_size_t(len(self._text))
        )
        if self.failure is not None:
            raise self.failure
        return checks, self._text.value.decode()

    def groups(self) -> list[str]:
        self._library.mla_rocm_groups(self._text, ctypes.c_size_t(len(self._text)))
        return self._text.value.decode().split()

    def prefill_scratch(self, tokens: int, stored: int, heads: int, batch: int) -> int:
        """The bytes of scratch that prefill in e4m3fn asks for."""
        self._library.mla_rocm_prefill_scratch.restype = ctypes.c_int64
        return self._library.mla_rocm_prefill_scratch(tokens, ctypes.c_int64(stored), heads, batch)

    def merge(self, ordinal: int) -> str:
        """What a small merge_states says."""
        self._library.mla_rocm_merge(ordinal, self._text, ctypes.c_size_t(len(self._text)))
        return self._text.value.decode()

    def merge_from_threads(self, ordinal: int, threads: int) -> str:
        """What so many of them at once say, each from a thread of its own."""
        self._library.mla_rocm_merge_from_threads(ordinal, threads, self._text, ctypes.c_size_t(len(self._text)))
        return self._text.value.decode()

    def copy(self, ordinal: int) -> str:
        self._library.mla_rocm_copy(ordinal, self._text, ctypes.c_size_t(len(self._text)))
        return self._text.value.decode()

    def _launch(self, image, image_bytes, symbol, grid, block, lds_bytes, arguments, argument_bytes) -> int:
        """Executes a launch; an exception is kept for the caller, and ends as a failed launch here."""
        try:
            program = self._program(ctypes.string_at(image, image_bytes))
            name = symbol.decode()
            self.launches.append((program.architecture, name, tuple(grid[:3]), tuple(block[:3]), lds_bytes))
            program.launch(
                name,
                tuple(grid[:3]),
                tuple(block[:3]),
                ctypes.string_at(arguments, argument_bytes),
                memory=self._memory(),
                dynamic_lds=lds_bytes,
                order=self.order,
            )
            return 0
        except Exception as error:
            self.failure = self.failure or error
            return _LAUNCH_FAILURE

    def _program(self, image: bytes) -> Program:
        if image not in self._programs:
            machine = {0x4C: "gfx942", 0x4F: "gfx950"}[image[48]]  # the low byte of the ELF header's flags
            self._programs[image] = Program(image, machine)
        return self._programs[image]

    def _memory(self) -> Memory:
        """What hipMalloc gave and the driver has not given back."""
        capacity = count = 0
        while count >= capacity:  # other threads allocate meanwhile
            capacity = count + 16
            addresses, sizes = (ctypes.c_uint64 * capacity)(), (ctypes.c_uint64 * capacity)()
            count = self.standin.standin_allocations(addresses, sizes, ctypes.c_size_t(capacity))
        memory = Memory()
        for address, size in zip(addresses[:count], sizes[:count], strict=True):
            memory.add(address, size)
        return memory


__all__ = ["ARCHITECTURES", "FOLDER", "Driver", "EmulatorError"]
