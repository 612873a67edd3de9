"""A contestant of the benchmarks: jitted calls in a row, timed on the host clock while the device is busy."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla.bench import programs


class Jitted:
    """call(each, *operands) for each of `varying`, as one program: a captured graph on a GPU.

    The calls have an operand each of their own, so that XLA cannot share them.
    """

    def __init__(
        self, name: str, call: Callable[..., Any], varying: Sequence[Any], operands: Sequence[Any] = ()
    ) -> None:
        self.name, self.calls = name, len(varying)

        def run(results, varying, operands):
            del results  # donated, so that the graph's addresses stay
            return tuple(call(each, *operands) for each in varying)

        self._operands = tuple(varying), tuple(operands)
        shapes = jax.eval_shape(functools.partial(run, None), *self._operands)
        self._results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        jitted = jax.jit(run, donate_argnums=0, keep_unused=True, compiler_options=programs.compiler_options())
        self._compiled = jitted.lower(self._results, *self._operands).compile()
        self.temporary_bytes = self._compiled.memory_analysis().temp_size_in_bytes

    def seconds(self, runs: int) -> float:
        results = jax.block_until_ready(self._results)
        started = time.perf_counter()
        for _ in range(runs):
            results = self._compiled(results, *self._operands)
        self._results = jax.block_until_ready(results)
        return time.perf_counter() - started

    def out(self) -> Any:
        """Of the first call."""
        return jax.tree.map(np.asarray, self._results[0])
