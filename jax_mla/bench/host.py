"""What a call and a step cost the host: the times from dispatch to return, and until the result is there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_mla import dispatch
from jax_mla.bench.inputs import SCALE
from jax_mla.bench.programs import GRAPHS
from jax_mla.cache import allocate_cache, slots, update_cache
from jax_mla.decode import mla_decode, plan_decode

LAYERS, HEADS, TOKENS, PAGE = 24, 24, 512, 64  # Kimi-K3 has 24 layers of MLA
REPEATS = 200


class HostCost(NamedTuple):
    """Microseconds, medians: `dispatch` until the call returns, `done` until its result is on the device."""

    what: str
    dispatch: float
    done: float


def _time(what: str, advance: Callable[[Any], Any], state: Any) -> HostCost:
    dispatched, done = [], []
    for _ in range(REPEATS):
        jax.block_until_ready(state)
        started = time.perf_counter()
        state = advance(state)
        dispatched.append(time.perf_counter() - started)
        jax.block_until_ready(state)
        done.append(time.perf_counter() - started)
    return HostCost(what, statistics.median(dispatched) * 1e6, statistics.median(done) * 1e6)


def _step(state: Any, page_table: jax.Array, layers: int) -> Any:
    """The attention of one token: one plan; of each layer the cache's update and the decode. All state is donated."""
    q, cache, kv_lens = state
    kv_lens = kv_lens + 1
    plan = plan_decode(kv_lens, num_heads=HEADS, cache=cache)
    where = slots(page_table, kv_lens - 1, PAGE)
    for layer in range(layers):
        cache = update_cache(cache, q[:, 0, 0, :512], q[:, 0, 0, 512:], where, layer=layer)
        out, _ = mla_decode(q, cache, page_table, kv_lens, layer=layer, plan=plan, scale=SCALE)
        q = jnp.concatenate([out, q[..., 512:]], axis=-1)
    return q, cache, kv_lens


def measure() -> Iterator[HostCost]:
    """One decode of 1 x 512 tokens, and a step of 24 layers; on a GPU with and without graphs."""
    pages = 2 * TOKENS // PAGE
    page_table = jnp.arange(pages, dtype=jnp.int32)[None]
    q = jnp.ones((1, 1, HEADS, 576), jnp.bfloat16)
    kv_lens = jnp.full((1,), TOKENS, jnp.int32)
    cache = allocate_cache(pages, PAGE)
    decode = jax.jit(lambda *operands: mla_decode(*operands, scale=SCALE)[0])
    yield _time("mla_decode, jitted", lambda _: decode(q, cache, page_table, kv_lens), None)
    compiled = decode.lower(q, cache, page_table, kv_lens).compile()
    yield _time("mla_decode, compiled ahead of time", lambda _: compiled(q, cache, page_table, kv_lens), None)

    ways: dict[str, dict[str, Any]] = {"": {}}
    if dispatch.default_platform() == "cuda":
        ways = {", captured": GRAPHS, ", uncaptured": {"xla_gpu_enable_command_buffer": ""}}
    for way, options in ways.items():
        step = jax.jit(_step, static_argnums=2, donate_argnums=0, compiler_options=options)
        state = (jnp.copy(q), allocate_cache(pages, PAGE, layers=LAYERS), jnp.copy(kv_lens))
        for _ in range(3):
            state = step(state, page_table, LAYERS)
        yield _time(f"step of {LAYERS} layers{way}", lambda s, run=step: run(s, page_table, LAYERS), state)
