"""Several devices: the shard_map helper, what it avoids, and the traps of shard_map's checks."""

import math
from functools import partial

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import native_only
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mla
from jax_mla import mla_decode, plan_context, sharded_decode, update_cache

OPERATION = "mla_decode"


def devices(count):
    """Of the platform that the test runs on: a machine with a GPU may have fewer."""
    default = jax.config.jax_default_device
    found = jax.devices(default.platform if default else None)
    if len(found) < count:
        pytest.skip(f"needs {count} devices")
    return found[:count]


def mesh(kind=AxisType.Auto, **axes):
    shape = tuple(axes.values())
    return jax.make_mesh(shape, tuple(axes), axis_types=(kind,) * len(axes), devices=devices(math.prod(shape)))


@pytest.fixture(scope="module")
def batch():
    """Two devices' worth of sequences, whose pages lie one after the other; page ids count from each device's first."""
    options = {"heads": 24, "q_lens": 2, "padding_pages": 2}
    halves = [cases.make(cases.DecodeCase("", lengths, seed=s, **options)) for s, lengths in enumerate([(200, 5)] * 2)]
    q, cache, table, lens = (np.concatenate(parts) for parts in zip(*(half.args for half in halves), strict=True))
    truths = [oracle.decode(*half.args, **half.static) for half in halves]
    return (q, cache, table, lens), tuple(np.concatenate(parts) for parts in zip(*truths, strict=True))


@pytest.mark.parametrize(
    "axes, specs",
    [
        ({"batch": 2, "heads": 2}, {"batch_axis": "batch", "head_axis": "heads"}),
        ({"batch": 2}, {"batch_axis": "batch"}),
    ],
)
def test_sharded_decode(axes, specs, batch, implementation):
    """Batch and heads over devices: the truth, and no collective in the program."""
    args, truth = batch
    decode = jax.jit(sharded_decode(mesh(**axes), scale=cases.SCALE, implementation=implementation, **specs))
    oracle.assert_attention(decode(*args), truth, 1e-2)
    text = decode.lower(*args).compile().as_text()
    assert "all-gather" not in text and "all-reduce" not in text


def test_heads_over_four_devices(implementation):
    """Kimi-K3's 96 heads on 4 devices: 24 each, the cache on every one; stacked, with a layer, with the pair."""
    inputs = cases.make(cases.DecodeCase("", (300, 70), heads=96, layers=2, layer=1, pair=True))
    decode = sharded_decode(mesh(heads=4), head_axis="heads", scale=cases.SCALE, implementation=implementation)
    got = decode(*inputs.args, layer=1)
    oracle.assert_attention(got, oracle.decode(*inputs.args, layer=1, **inputs.static), 1e-2)


@native_only
def test_bare_call_gathers(implementation):
    """The trap that the helper avoids: a custom call on operands sharded over automatic axes gathers them."""
    inputs = cases.make(cases.DecodeCase("", (300, 70), heads=96))
    over_heads = NamedSharding(mesh(heads=4), P(None, None, "heads"))
    q = jax.device_put(inputs.q, over_heads)
    run = jax.jit(partial(mla_decode, implementation=implementation, **inputs.static))
    text = run.lower(q, *inputs.args[1:]).compile().as_text()
    assert "all-gather" in text
    oracle.assert_attention(run(q, *inputs.args[1:]), oracle.decode(*inputs.args, **inputs.static), 1e-2)


def test_explicit_axes_are_refused():
    """Operands sharded over explicit axes are seen while tracing, and refused with the way out."""
    inputs = cases.make(cases.DecodeCase("", (300, 70), heads=96))
    over_heads = NamedSharding(mesh(AxisType.Explicit, heads=4), P(None, None, "heads"))
    q = jax.device_put(inputs.q, over_heads)
    with pytest.raises(ValueError, match=r"q is sharded as .*heads.*sharded_decode, or inside jax.shard_map"):
        mla_decode(q, *inputs.args[1:], **inputs.static)


def test_results_vary_over_devices(implementation):
    """Results are typed as varying: replicated out_specs are refused instead of returning one device's values."""
    inputs = cases.make(cases.DecodeCase("", (300, 70), heads=96))
    run = partial(mla_decode, implementation=implementation, **inputs.static)
    specs = (P(None, None, "heads"), P(), P(), P())
    wrong = jax.shard_map(run, mesh=mesh(heads=4), in_specs=specs, out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        wrong(*inputs.args)


def test_scan_carry_inside_shard_map(implementation):
    """A decode step in a scan's carry, with its cache update, passes shard_map's check of varying types."""
    inputs = cases.make(cases.DecodeCase("", (60, 7), heads=8, padding_pages=0))
    new = np.random.default_rng(0).standard_normal((2, 576)).astype(inputs.cache.dtype)

    def steps(q, cache, page_table, kv_lens):
        def step(carry, _):
            cache, kv_lens, out = carry
            where = jax_mla.slots(page_table, kv_lens, 64)
            cache = update_cache(cache, jnp.asarray(new[:, :512]), jnp.asarray(new[:, 512:]), where)
            out, _ = mla_decode(q, cache, page_table, kv_lens + 1, implementation=implementation, **inputs.static)
            return (cache, kv_lens + 1, out), None

        start = cache, kv_lens, jnp.zeros_like(q[..., :512])
        return jax.lax.scan(step, start, length=2)[0][2]

    specs = (P(None, None, "heads"), P(), P(), P())
    run = jax.shard_map(steps, mesh=mesh(heads=4), in_specs=specs, out_specs=P(None, None, "heads"))
    out = jax.jit(run)(*inputs.args)
    cache = inputs.cache.copy()
    for b, n in enumerate(inputs.kv_lens):
        for j in (n, n + 1):
            cache[inputs.page_table[b, j // 64], j % 64] = new[b]
    truth = oracle.decode(inputs.q, cache, inputs.page_table, inputs.kv_lens + 2, **inputs.static)
    oracle.assert_attention((out, truth[1]), truth, 1e-2)


def test_context_and_prefill_inside_shard_map():
    """Heads over devices for the operations of prompts too: scan carries and empty starts pass the check."""
    rng = np.random.default_rng(1)
    lengths, heads = (40, 0, 17), 8
    cache, table = cases.make_cache(rng, lengths, page_size=16, cache_dtype="float32")
    cu = np.array([0, 2, 3, 6], np.int32)
    q = rng.standard_normal((6, heads, 192)).astype(np.float32)
    w_kv_b = (rng.standard_normal((512, heads, 256)) / 22).astype(np.float32)
    plan = plan_context(lengths, workspace_tokens=32, page_size=16)

    def context(q, w_kv_b):
        return jax_mla.mla_context(q, cache, table, plan, w_kv_b, cu_q_lens=cu, scale=0.07)

    by_head = P(None, "heads")
    options = {"mesh": mesh(heads=4), "out_specs": (by_head, by_head)}
    got = jax.jit(jax.shard_map(context, in_specs=(by_head, by_head), **options))(q, w_kv_b)
    oracle.assert_attention(got, oracle.context(q, cache, table, lengths, w_kv_b, cu_q_lens=cu, scale=0.07), 1e-5)

    kv_up = rng.standard_normal((6, heads, 256)).astype(np.float32)
    k_pe = rng.standard_normal((6, 64)).astype(np.float32)

    def prefill(q, kv_up):
        k = jax_mla.pack_kv(kv_up, k_pe)
        own = jax_mla.mla_prefill(q, k, kv_up, cu, cu, causal=True, scale=0.07, value_offset=128)
        return jax_mla.merge_states(*own, jnp.zeros_like(own[0]), jnp.full_like(own[1], -jnp.inf))

    got = jax.jit(jax.shard_map(prefill, in_specs=(by_head, by_head), **options))(q, kv_up)
    k = np.concatenate([kv_up[..., :128], np.repeat(k_pe[:, None], heads, axis=1)], axis=-1)
    oracle.assert_attention(got, oracle.prefill(q, k, kv_up[..., 128:], cu, cu, causal=True, scale=0.07), 1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch_axis": "rows"}, "batch_axis is 'rows'; the mesh has heads"),
        ({"head_axis": "h"}, "head_axis is 'h'"),
        ({"head_axis": "heads", "cu_q_lens": np.zeros(3, np.int32)}, "cu_q_lens cannot be split"),
        ({"head_axis": "heads", "plan": None}, "plan cannot be split"),
    ],
)
def test_options_that_do_not_go_with_it(options, message):
    with pytest.raises(ValueError, match=message):
        sharded_decode(mesh(heads=4), scale=1.0, **options)
