"""Contestants of the benchmarks: jitted calls in a row, timed on the host clock while the device is busy."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla.bench import programs


class _Program:
    """run(results, *operands) as one program, a captured graph on a GPU.

    The results of one execution are donated to the next, so that the graph's addresses stay.
    """

    def __init__(self, name: str, calls: int, run: Callable[..., Any], results: Any, operands: tuple[Any, ...]) -> None:
        self.name, self.calls = name, calls
        self._results, self._operands = results, operands
        jitted = jax.jit(run, donate_argnums=0, keep_unused=True, compiler_options=programs.compiler_options())
        self._compiled = jitted.lower(results, *operands).compile()
        self.temporary_bytes = self._compiled.memory_analysis().temp_size_in_bytes

    def seconds(self, runs: int) -> float:
        results = jax.block_until_ready(self._results)
        started = time.perf_counter()
        for _ in range(runs):
            results = self._compiled(results, *self._operands)
        self._results = jax.block_until_ready(results)
        return time.perf_counter() - started

    def first(self) -> Any:
        """The first call's result, on the device."""
        return self._results[0]

    def out(self) -> Any:
        """The same on the host."""
        return jax.tree.map(np.asarray, self.first())

    def rows(self, chosen: np.ndarray) -> np.ndarray:
        """Rows of the first array in it, on the host."""
        return np.asarray(jax.tree.leaves(self.first())[0][chosen])


class Jitted(_Program):
    """call(each, *operands) for each of `varying`.

    The calls have an operand each of their own, so that XLA cannot share them.
    is_attention: call is a kernel's and returns (out, lse). Then of all calls but the first only lse is returned, in
    one array, as jax_mla/bench/programs.py does and says why.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., Any],
        varying: Sequence[Any],
        operands: Sequence[Any] = (),
        *,
        is_attention: bool = False,
    ) -> None:
        def run(results, varying, operands):
            del results
            done = tuple(call(each, *operands) for each in varying)
            return programs.first_and_lses(done) if is_attention else done

        arrays = tuple(varying), tuple(operands)
        shapes = jax.eval_shape(functools.partial(run, None), *arrays)
        results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        super().__init__(name, len(varying), run, results, arrays)


class InPlace(_Program):
    """state = call(state, each) for each of `varying`: updates, each of what the last one left.

    state: an array whose first axis the calls go along; it is donated.
    """

    def __init__(self, name: str, call: Callable[[Any, Any], Any], varying: Sequence[Any], state: jax.Array) -> None:
        def run(state, varying):
            return functools.reduce(call, varying, state)

        super().__init__(name, len(varying), run, state, (tuple(varying),))
