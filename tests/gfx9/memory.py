"""Global memory as the emulated program sees it: ranges of this process's memory that it may touch."""

import ctypes

import numpy as np

from .core import Allocation

_GUARD = 4096  # bytes on both sides of an allocation of ours that no other one lies in


class Memory:
    """A set of allocations. Each access of a lane has to lie in one of them as a whole."""

    def __init__(self):
        self._ranges: dict[int, tuple[int, bool]] = {}  # base: size in bytes, may be written
        self._kept: dict[int, np.ndarray] = {}

    def add(self, address: int, size: int, *, writable: bool = True) -> None:
        """Lets the program touch `size` bytes at an address of this process, which stay the caller's."""
        self._ranges[address] = (size, writable)

    def share(self, array: np.ndarray, *, writable: bool = True) -> int:
        """Lets the program touch an array itself; gives its address."""
        if not array.flags.c_contiguous:
            raise ValueError("a shared array has to be contiguous")
        self._kept[array.ctypes.data] = array
        self.add(array.ctypes.data, array.nbytes, writable=writable)
        return array.ctypes.data

    def allocate(self, array: np.ndarray, *, writable: bool = True) -> int:
        """A copy of an array, far from all others; gives its address. `read` has what became of it."""
        data = np.ascontiguousarray(array)
        room = np.zeros(data.nbytes + 2 * _GUARD + 256, np.uint8)
        address = (room.ctypes.data + _GUARD + 255) // 256 * 256
        ctypes.memmove(address, data.ctypes.data, data.nbytes)
        self._kept[address] = room
        self.add(address, data.nbytes, writable=writable)
        return address

    def read(self, address: int, like: np.ndarray) -> np.ndarray:
        """The array that now lies at an address, with shape and dtype of `like`."""
        size, _ = self._ranges[address]
        if size < like.nbytes:
            raise ValueError(f"the allocation has {size} bytes, {like.nbytes} are asked for")
        result = np.empty(like.shape, like.dtype)
        ctypes.memmove(result.ctypes.data, address, like.nbytes)
        return result

    def free(self, address: int) -> None:
        del self._ranges[address]
        self._kept.pop(address, None)

    def records(self, *extra: tuple[int, int, bool]):
        """The allocations, and extra ones as (address, size, writable), as the core takes them."""
        ranges = [(base, size, writable) for base, (size, writable) in self._ranges.items()] + list(extra)
        return (Allocation * len(ranges))(*ranges)
