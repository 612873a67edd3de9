"""What is timed: jitted programs of many decode calls, each over a cache of its own.

A program's calls follow each other on the device without the host between them. On a GPU they are one captured graph:
their addresses stay, since the results of one execution are donated to the next. Nothing is dropped, since of every
call some result is returned, or shared, since every call has another cache or another array of lengths.

Every array that a program takes or returns costs the host some ten microseconds, as long as a small call takes the
device. So of all kernels' calls but the first only lse is returned, in one array: a kernel runs whole for any of its
results. XLA would leave out what makes the others, and so of its calls everything is returned.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_mla import dispatch
from jax_mla.bench.cells import LATENT
from jax_mla.bench.inputs import SCALE, Inputs
from jax_mla.decode import mla_decode, plan_decode

# XLA captures from this many operations in a row on; its default is 5.
GRAPHS = {"xla_gpu_graph_min_graph_size": 1}

Call = Callable[[Inputs, Any, int], tuple[jax.Array, ...]]


def compiler_options() -> dict[str, Any]:
    return GRAPHS if dispatch.default_platform() == "cuda" else {}


@dataclasses.dataclass
class Program:
    """One contestant of a cell, or a part of one: `calls` calls a run. `out` is the first call's first result."""

    name: str
    calls: int
    arguments: Callable[[Inputs], tuple[Any, ...]]
    jitted: Any
    lowered_for: tuple[Any, ...]
    compiled: Any = None
    operands: tuple[Any, ...] = ()
    results: Any = None

    def lower(self) -> jax.stages.Lowered:
        return self.jitted.lower(*self.lowered_for)

    def start(self, inputs: Inputs) -> None:
        """Binds the arrays; results start as zeros."""
        self.operands = self.arguments(inputs)
        self.results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.lowered_for[0])

    def seconds(self, runs: int) -> float:
        """Of that many runs: the device is busy throughout but for the first dispatch and the last answer."""
        results, self.results = jax.block_until_ready(self.results), None  # donated below
        started = time.perf_counter()
        for _ in range(runs):
            results = self.compiled(results, *self.operands)
        jax.block_until_ready(results)
        self.results = results
        return time.perf_counter() - started

    def out(self) -> jax.Array:
        return self.results[0][0]

    def stop(self) -> None:
        """Lets go of the arrays."""
        self.operands, self.results = (), None


def first_and_lses(calls: tuple[tuple[jax.Array, jax.Array], ...]) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Of kernels' (out, lse): the first call's, and lse of every one in one array."""
    return calls[0], jnp.stack([lse for _, lse in calls])


def _program(
    name: str,
    calls: int,
    call: Call,
    prepare: Callable[[Inputs], Any],
    shapes: Inputs,
    calls_a_length: int,
    *,
    is_kernel: bool = False,
) -> Program:
    """`call(inputs, extra, layer)`, `calls` times; `extra` is what `prepare` makes of the inputs beforehand.

    calls_a_length: calls that share an array of lengths. All of these arrays hold the same.
    is_kernel: call is mla_decode's by a kernel.
    """

    def run(results, operands, scales, lens, extra):
        del results
        q, cache, page_table, _ = operands
        fixed = dataclasses.replace(shapes, q=q, cache=cache, page_table=page_table, scales=scales)
        each = [dataclasses.replace(fixed, kv_lens=n) for n in lens]
        done = tuple(call(each[i // calls_a_length], extra, i % fixed.copies) for i in range(calls))
        return first_and_lses(done) if is_kernel else done

    def arguments(inputs: Inputs) -> tuple[Any, ...]:
        lens = tuple(jnp.copy(inputs.kv_lens) for _ in range(-(-calls // calls_a_length)))
        return inputs.operands, inputs.scales, lens, prepare(inputs)

    given = jax.eval_shape(arguments, shapes)
    results = jax.eval_shape(functools.partial(run, None), *given)
    jitted = jax.jit(run, donate_argnums=0, keep_unused=True, compiler_options=compiler_options())
    return Program(name, calls, arguments, jitted, (results, *given))


_OPERANDS = ("q", "cache", "page_table", "kv_lens")
jax.tree_util.register_dataclass(Inputs, data_fields=[*_OPERANDS, "scales"], meta_fields=["cell", "calls"])


def _plan(implementation: str | None, inputs: Inputs) -> Any:
    cell = inputs.cell
    return plan_decode(
        inputs.kv_lens,
        num_heads=cell.heads,
        cache=inputs.cache,
        q_len=cell.queries,
        q_dtype=inputs.q.dtype,
        implementation=implementation,
    )


def decode(name: str, implementation: str | None, calls: int, shapes: Inputs) -> Program:
    """mla_decode with a plan that was made before, as all layers of a step but the first have it."""

    def call(inputs: Inputs, plan: Any, layer: int) -> tuple[jax.Array, jax.Array]:
        return mla_decode(
            *inputs.operands, layer=layer, scale=SCALE, plan=plan, implementation=implementation, **inputs.scales
        )

    prepare = functools.partial(_plan, implementation)
    return _program(name, calls, call, prepare, shapes, shapes.copies, is_kernel=implementation != dispatch.XLA)


def plan(name: str, implementation: str | None, calls: int, shapes: Inputs) -> Program:
    """plan_decode alone."""

    def call(inputs: Inputs, _: Any, layer: int) -> tuple[jax.Array, ...]:
        return tuple(jax.tree.leaves(_plan(implementation, inputs)))

    return _program(name, calls, call, lambda inputs: None, shapes, calls_a_length=1)


def plan_and_decode(name: str, implementation: str | None, calls: int, shapes: Inputs) -> Program:
    """plan_decode and mla_decode in turn; each call has lengths of its own, so that XLA cannot share a plan."""

    def call(inputs: Inputs, _: Any, layer: int) -> tuple[jax.Array, jax.Array]:
        plan = _plan(implementation, inputs)
        return mla_decode(
            *inputs.operands, layer=layer, scale=SCALE, plan=plan, implementation=implementation, **inputs.scales
        )

    is_kernel = implementation != dispatch.XLA
    return _program(name, calls, call, lambda inputs: None, shapes, calls_a_length=1, is_kernel=is_kernel)


def gather_einsum(name: str, calls: int, shapes: Inputs) -> Program:
    """What a user writes without this library: pages gathered, two einsums in the queries' dtype, a softmax in fp32."""

    def call(inputs: Inputs, _: Any, layer: int) -> tuple[jax.Array]:
        q, cache, table, kv_lens = inputs.operands
        tokens = table.shape[1] * cache.shape[2]
        dtype = jnp.bfloat16 if q.dtype.itemsize == 1 else q.dtype
        q_scale, k_scale = (inputs.scales.get(name, 1.0) for name in ("q_scale", "k_scale"))
        rows = cache[layer, table].reshape(table.shape[0], tokens, -1).astype(dtype)
        scores = jnp.einsum("bqhd,bnd->bqhn", q.astype(dtype), rows, preferred_element_type=jnp.float32)
        keys, last = jnp.arange(tokens), kv_lens[:, None] - q.shape[1] + jnp.arange(q.shape[1])
        visible = keys <= last[:, :, None, None]
        weights = jax.nn.softmax(jnp.where(visible, scores * (SCALE * q_scale * k_scale), -jnp.inf), axis=-1)
        out = jnp.einsum("bqhn,bnl->bqhl", weights.astype(dtype), rows[..., :LATENT])
        return ((out.astype(jnp.float32) * k_scale).astype(dtype),)

    return _program(name, calls, call, lambda inputs: None, shapes, shapes.copies)
