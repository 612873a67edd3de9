"""What the machine can do at most, measured in the same run: copying, reading, multiplying."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

# Plain launches: the same copy in a graph was seen at two thirds of its speed.
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """TBps, of bytes read and written, or TFLOPs; the other is 0. size: bytes of the array, or rows of the matrices."""

    name: str
    size: int
    us: float
    TBps: float = 0.0
    TFLOPs: float = 0.0


def _copy(_: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.copy(x)


def _sum(_: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(x)


def _product(_: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    # b transposed, the only way that fp8 products take it
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


@functools.cache
def _compiled(function: Callable[..., Any], gpu: bool, *operands: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
    """Once a process: XLA tries many kernels for a product."""
    options = NO_GRAPHS if gpu else {}
    return jax.jit(function, donate_argnums=0, keep_unused=True, compiler_options=options).lower(*operands).compile()


def _us(function: Callable[..., Any], operands: tuple[Any, ...], seconds: float, gpu: bool) -> float:
    """Of one run: the median of five stretches. The first operand is donated and replaced by the result."""
    compiled = _compiled(function, gpu, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands))
    result, *rest = operands

    def stretch(runs: int) -> float:
        nonlocal result
        jax.block_until_ready(result)
        started = time.perf_counter()
        for _ in range(runs):
            result = compiled(result, *rest)
        jax.block_until_ready(result)
        return (time.perf_counter() - started) / runs

    stretch(2)
    runs = max(1, round(seconds / stretch(1)))
    return sorted(stretch(runs) for _ in range(5))[2] * 1e6


def measure(gpu: bool, seconds: float) -> Iterator[Ceiling]:
    """A copy and a sum of a large array; matrix products in bf16, and in fp8 on a GPU."""
    size = 1 << (30 if gpu else 27)
    data = jax.jit(lambda: jax.random.normal(jax.random.key(0, impl="rbg"), (size // 4,)))()
    us = _us(_copy, (jnp.zeros_like(data), data), seconds, gpu)
    yield Ceiling("copy", size, us, TBps=2 * size / us * 1e-6)
    us = _us(_sum, (jnp.float32(0), data), seconds, gpu)
    yield Ceiling("read", size, us, TBps=size / us * 1e-6)
    del data

    rows = 8192 if gpu else 1024
    normal = functools.partial(jax.random.normal, shape=(rows, rows), dtype=jnp.bfloat16)
    matrices = jax.jit(lambda key: [normal(k) for k in jax.random.split(key)])(jax.random.key(1, impl="rbg"))
    for name, dtype in (("bf16", jnp.bfloat16), ("fp8", jnp.float8_e4m3fn))[: 1 + gpu]:
        a, b = (m.astype(dtype) for m in matrices)
        us = _us(_product, (jnp.zeros((rows, rows), jnp.bfloat16), a, b), seconds, gpu)
        yield Ceiling(f"matmul {name}", rows, us, TFLOPs=2 * rows**3 / us * 1e-6)


def floor_us(nbytes: int, flops: int, dtype: str, ceilings: list[Ceiling]) -> float | None:
    """The larger of both bounds, in microseconds; None where the ceilings were not measured."""
    found = {c.name: c for c in ceilings}
    matmul = found.get("matmul fp8" if dtype == "fp8" else "matmul bf16") or found.get("matmul bf16")
    bandwidth = max((c.TBps for c in ceilings), default=0.0)
    if not bandwidth or matmul is None:
        return None
    return max(nbytes / bandwidth, flops / matmul.TFLOPs) * 1e-6
