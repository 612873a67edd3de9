"""A peer's calls as one captured CUDA graph over JAX's memory, timed by device events."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch


class Shared:
    """JAX's arrays as PyTorch tensors over the same memory.

    fp8, which DLPack does not carry everywhere, is shared from a copy of its bytes. The arrays are kept here: results
    from copies that nothing else held were garbage.
    """

    def __init__(self) -> None:
        self._arrays: list[jax.Array] = []

    def __call__(self, x: jax.Array) -> torch.Tensor:
        is_fp8 = x.dtype.itemsize == 1
        array = jax.block_until_ready(jax.lax.bitcast_convert_type(x, jnp.uint8) if is_fp8 else x)
        self._arrays.append(array)
        shared = torch.from_dlpack(array)
        return shared.view(torch.float8_e4m3fn) if is_fp8 else shared


class Replay:
    """Calls in one captured graph. calls: each gives the peer's result. shape: of `out`, as the first call's."""

    def __init__(
        self, name: str, calls: list[Callable[[], torch.Tensor]], shared: Shared, shape: tuple[int, ...] | None = None
    ) -> None:
        self.name, self.calls, self._shape = name, len(calls), shape
        self._kept = calls, shared  # what the graph reads and only they hold: a schedule of the work, JAX's arrays
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                calls[0]()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._out = calls[0]()
                for call in calls[1:]:
                    call()
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
        out = self._out.float().cpu().numpy()
        return out if self._shape is None else out.reshape(self._shape)

    def rows(self, chosen: np.ndarray) -> np.ndarray:
        """Of the first call's result."""
        return self._out[torch.from_numpy(chosen).to(self._out.device)].float().cpu().numpy()


def over_copies(name: str, inputs: Any, shared: Shared, call: Callable[[int], torch.Tensor]) -> Replay:
    """As many calls as jax_mla's programs have, over the copies of the cache in turn.

    call: a copy's number -> out, [B, Q, H, 512] or [T, H, 512].
    """
    calls = [functools.partial(call, i % inputs.copies) for i in range(inputs.calls)]
    return Replay(name, calls, shared, (*inputs.q.shape[:-1], 512))
