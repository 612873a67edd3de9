"""A decode step of several layers, captured once: replays call no handler, and follow what the device's arrays hold."""

import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import on_gpu

from jax_mla import _ffi, mla_decode, plan_decode, slots, update_cache

OPERATION = "mla_decode"
pytestmark = pytest.mark.leave_out("xla*", "cpu:*")  # the CPU has no graphs; there the steps themselves are tested
LAYERS, HEADS, PAGE, STEPS = 4, 24, 64, 6
KV_LENS = (700, 63, 128, 1, 300)
# Graphs from the first operation on; else XLA captures runs of five and more.
GRAPHS = {"xla_gpu_graph_min_graph_size": 1}
TOLERANCE = cases.TOLERANCES["bfloat16"]


def initial_state():
    """Everything a step reads and writes; NaN in all slots and pages that no token has been written to."""
    rng = np.random.default_rng(0)
    cache, table = cases.make_cache(rng, KV_LENS, page_size=PAGE, cache_dtype="bfloat16", layers=LAYERS)
    # The next page of each sequence, for the tokens that the steps add.
    fresh = np.full((LAYERS, len(KV_LENS), PAGE, cases.WIDTH), np.nan, np.float32).astype(cache.dtype)
    for b, length in enumerate(KV_LENS):
        table[b, -(-length // PAGE)] = cache.shape[1] + b
    cache = np.concatenate([cache, fresh], axis=1)
    q = rng.standard_normal((len(KV_LENS), 1, HEADS, cases.WIDTH), np.float32).astype(cache.dtype)
    state = {
        "cache": cache,
        "table": table,
        "kv_lens": np.asarray(KV_LENS, np.int32),
        "q": q,
        "queries": np.zeros((LAYERS, *q.shape), q.dtype),
        "out": np.zeros((LAYERS, *q.shape[:-1], cases.LATENT), q.dtype),
        "lse": np.zeros((LAYERS, *q.shape[:-1]), np.float32),
    }
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(state)  # XLA's own memory, so that it can be donated


def make_step(implementation):
    platform = implementation.partition(":")[0]

    def step(state):
        """The next token of each sequence; the sequences change places, so that no row's length or pages stay."""
        table, kv_lens = jnp.roll(state["table"], 1, axis=0), jnp.roll(state["kv_lens"], 1) + 1
        where = slots(table, kv_lens - 1, PAGE)
        plan = plan_decode(kv_lens, num_heads=HEADS, cache=state["cache"], implementation=implementation)
        cache, q, kept = state["cache"], state["q"], {"queries": [], "out": [], "lse": []}
        for layer in range(LAYERS):
            new = q[:, 0, layer]
            cache = update_cache(cache, new[:, :512], new[:, 512:], where, layer=layer, implementation=platform)
            out, lse = mla_decode(
                q, cache, table, kv_lens, layer=layer, plan=plan, scale=cases.SCALE, implementation=implementation
            )
            for name, x in (("queries", q), ("out", out), ("lse", lse)):
                kept[name].append(x)
            wide = out.astype(jnp.float32)
            normalised = (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)).astype(q.dtype)
            q = jnp.concatenate([normalised, q[..., 512:]], axis=-1)
        kept = {name: jnp.stack(x) for name, x in kept.items()}
        return {"cache": cache, "table": table, "kv_lens": kv_lens, "q": q} | kept

    return step


def check(state):
    """Each layer's result from its queries and the cache; and the new token's row in the cache."""
    state = {name: np.asarray(x) for name, x in state.items()}
    for layer in range(LAYERS):
        q, cache = state["queries"][layer], state["cache"][layer]
        for b, length in enumerate(state["kv_lens"]):
            page, offset = divmod(int(length) - 1, PAGE)
            np.testing.assert_array_equal(cache[state["table"][b, page], offset], q[b, 0, layer])
        out, lse = oracle.decode(q, cache, state["table"], state["kv_lens"], scale=cases.SCALE)
        error = np.linalg.norm(state["out"][layer].astype(np.float64) - out) / np.linalg.norm(out)
        assert error < TOLERANCE
        np.testing.assert_allclose(state["lse"][layer], lse, atol=1e-3)


def calls(implementation):
    """Calls of all handlers so far."""
    return sum(_ffi.MODULES[implementation.partition(":")[0]].handler_calls().values())


def captured_calls(directory):
    """Of the dumped thunk sequence: custom calls inside command buffers, and outside."""
    (file,) = directory.glob("*thunk_sequence_after_thunk_passes.txt")
    inside, outside, buffers, depth = 0, 0, 0, None
    for line in file.read_text().splitlines():
        indent = len(line) - len(line.lstrip())
        if depth is not None and indent <= depth:
            depth = None
        if "kCommandBuffer" in line:
            buffers, depth = buffers + 1, indent
        elif re.search(r"\bkCustomCall\b", line):
            inside, outside = inside + (depth is not None), outside + (depth is None)
    return buffers, inside, outside


def test_replays_call_no_handler_and_follow_the_values(implementation, tmp_path):
    options = GRAPHS | {"xla_dump_to": str(tmp_path)} if on_gpu() else {}
    step = jax.jit(make_step(implementation), donate_argnums=0, compiler_options=options)
    state = initial_state()
    program = step.lower(state).compile()
    counts, addresses = [calls(implementation)], []
    for _ in range(STEPS):
        state = program(state)
        check(state)
        counts.append(calls(implementation))
        addresses.append(state["cache"].unsafe_buffer_pointer())

    each = 1 + 2 * LAYERS  # the plan; update and decode of each layer
    made = list(np.diff(counts))
    if on_gpu():
        # The first run warms up, the second captures; in the third, XLA's temporary memory may move for the last time.
        # An allocation or a synchronisation in a handler would break the capture.
        assert made[:2] == [each, each]
        assert made[3:] == [0] * (STEPS - 3)
        assert len(set(addresses)) == 1  # updated in place
        buffers, inside, outside = captured_calls(tmp_path)
        assert buffers > 0
        assert (inside, outside) == (each, 0)
    else:
        assert made == [each] * STEPS


def test_addresses_that_change(implementation):
    """Tables and lengths from the host in new arrays each step: captured again or not, never stale."""
    step = jax.jit(make_step(implementation), donate_argnums=0, compiler_options=GRAPHS if on_gpu() else {})
    state, held = initial_state(), []
    for _ in range(STEPS):
        fresh = {name: jnp.asarray(np.roll(np.asarray(state[name]), 2, axis=0)) for name in ("table", "kv_lens")}
        held.append({name: state[name] for name in fresh})  # keeps the old memory taken
        state = step({**state, **{name: jnp.copy(x) for name, x in fresh.items()}})
        check(state)


def test_two_programs_take_turns(implementation):
    """Another program's capture may evict graphs; each goes on with the right values."""
    options = GRAPHS if on_gpu() else {}
    programs = [jax.jit(make_step(implementation), donate_argnums=0, compiler_options=options) for _ in range(2)]
    states = [initial_state() for _ in programs]
    for _ in range(3):
        states = [program(state) for program, state in zip(programs, states, strict=True)]
    for state in states:
        check(state)
    for name in ("out", "lse"):
        np.testing.assert_array_equal(*(np.asarray(state[name]) for state in states))
