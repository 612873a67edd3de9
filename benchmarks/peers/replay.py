"""A peer's calls as one captured CUDA graph over JAX's memory, timed by device events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch


def tensor(x: jax.Array) -> torch.Tensor:
    """The same memory as a PyTorch tensor; fp8, which DLPack does not carry everywhere, from a copy of its bytes."""
    jax.block_until_ready(x)
    if x.dtype.itemsize > 1:
        return torch.from_dlpack(x)
    raw = jax.block_until_ready(jax.lax.bitcast_convert_type(x, jnp.uint8))
    return torch.from_dlpack(raw).view(torch.float8_e4m3fn)


class Replay:
    """`calls` calls of `call(i)`, each giving out [B, Q, H, 512] or [T, H, 512]."""

    def __init__(self, name: str, calls: int, call: Callable[[int], torch.Tensor], shape: tuple[int, ...]) -> None:
        self.name, self.calls, self._shape = name, calls, shape
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                call(0)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._out = call(0)
                for i in range(1, calls):
                    call(i)
        torch.cuda.synchronize()

    def seconds(self, runs: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(runs):
            self._graph.replay()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) * 1e-3

    def out(self) -> np.ndarray:
        return self._out.float().cpu().numpy().reshape(self._shape)


def replay(name: str, inputs: Any, call: Callable[[int], torch.Tensor]) -> Replay:
    """Of a cell's inputs: as many calls as jax_mla's programs have, over the copies of the cache in turn."""
    return Replay(name, inputs.calls, lambda i: call(i % inputs.copies), (*inputs.q.shape[:-1], 512))
