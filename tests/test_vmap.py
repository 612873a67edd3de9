"""vmap: query batch axes fold into the batch of sequences; a batched cache is refused."""

from functools import partial

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_mla import merge_states, mla_decode, plan_decode, update_cache

OPERATION = "mla_decode"


@pytest.fixture(scope="module")
def inputs():
    return cases.make(cases.DecodeCase("", (300, 65, 1, 0), heads=12, q_lens=2))


def decode(implementation, static, **options):
    return partial(mla_decode, implementation=implementation, **static, **options)


def test_over_sequences(inputs, implementation):
    """Queries, tables and lengths mapped together: the same as one batch."""
    run = decode(implementation, inputs.static)

    def one(q, page_table, kv_lens):
        out, lse = run(q[None], inputs.cache, page_table[None], kv_lens[None])
        return out[0], lse[0]

    got = jax.jit(jax.vmap(one))(inputs.q, inputs.page_table, inputs.kv_lens)
    oracle.assert_attention(got, oracle.decode(*inputs.args, **inputs.static), 1e-2)


@pytest.mark.parametrize("mapped", ["q", "page_table", "kv_lens"])
def test_over_one_operand(mapped, inputs, implementation):
    """Only one operand is mapped; the others are shared by all calls."""
    run = decode(implementation, inputs.static)
    arrays = {"q": inputs.q, "page_table": inputs.page_table, "kv_lens": inputs.kv_lens}
    stacked = np.stack([arrays[mapped], arrays[mapped][::-1], arrays[mapped]])
    if mapped != "q":  # lengths that any row of the table holds
        arrays["kv_lens"] = np.minimum(arrays["kv_lens"], 1)
        stacked = np.minimum(stacked, 1) if mapped == "kv_lens" else stacked
        arrays["page_table"] = np.maximum(arrays["page_table"], 0)
        arrays["page_table"][:, 0] = inputs.page_table[0, 0]
        if mapped == "page_table":
            stacked = np.stack([arrays[mapped]] * 3)
            stacked[1, :, 0] = inputs.page_table[1, 0]
    axes = {name: 0 if name == mapped else None for name in arrays}
    call = jax.vmap(lambda q, t, n: run(q, inputs.cache, t, n), in_axes=tuple(axes.values()))
    got = jax.jit(call)(*(arrays | {mapped: stacked}).values())
    for i in range(3):
        each = arrays | {mapped: stacked[i]}
        truth = oracle.decode(each["q"], inputs.cache, each["page_table"], each["kv_lens"], **inputs.static)
        oracle.assert_attention((got[0][i], got[1][i]), truth, 1e-2)


def test_nested_and_along_another_axis(inputs, implementation):
    """Two levels, the inner one along the last batch axis of q."""
    run = decode(implementation, inputs.static)
    q = np.stack([np.stack([inputs.q, -inputs.q], axis=-1), np.stack([inputs.q * 2, inputs.q], axis=-1)])
    inner = jax.vmap(lambda q: run(q, *inputs.args[1:]), in_axes=-1, out_axes=1)
    out, lse = jax.jit(jax.vmap(inner))(q)
    for i in range(2):
        for j in range(2):
            truth = oracle.decode(q[i, ..., j], *inputs.args[1:], **inputs.static)
            oracle.assert_attention((out[i, :, j], lse[i, :, j]), truth, 1e-2)


@pytest.mark.parametrize("offsets", ["shared", "mapped"])
def test_ragged(offsets, implementation):
    """Ragged queries, with tokens that no request owns, in every mapped call."""
    case = cases.DecodeCase("", (150, 64, 9), q_lens=(3, 0, 2), heads=6, unowned_queries=2)
    inputs = cases.make(case)
    run = decode(implementation, inputs.static)
    q = np.stack([inputs.q, -inputs.q])
    cu = np.stack([inputs.arrays["cu_q_lens"], np.array([1, 2, 4, 5])]).astype(np.int32)
    if offsets == "shared":
        cu[1] = cu[0]
    call = jax.vmap(
        lambda q, cu: run(q, *inputs.args[1:], cu_q_lens=cu), in_axes=(0, None if offsets == "shared" else 0)
    )
    out, lse = jax.jit(call)(q, cu[0] if offsets == "shared" else cu)
    for i in range(2):
        truth = oracle.decode(q[i], *inputs.args[1:], cu_q_lens=cu[i], **inputs.static)
        oracle.assert_attention((out[i], lse[i]), truth, 1e-2)


def test_pair_stacked_cache_and_plan(implementation):
    """The pair, a layer and a plan beside mapped queries; a plan for one call is not used for all."""
    inputs = cases.make(cases.DecodeCase("", (150, 64), pair=True, layers=2, layer=1, heads=6))
    plan = plan_decode(
        jnp.asarray(inputs.kv_lens),
        num_heads=6,
        cache=jax.ShapeDtypeStruct(inputs.cache.shape, inputs.cache.dtype),
        implementation=implementation,
    )
    run = decode(implementation, inputs.static, layer=1, plan=plan)
    pairs = tuple(np.stack([x, -x, x]) for x in inputs.q)
    out, lse = jax.vmap(lambda latent, rope: run((latent, rope), *inputs.args[1:]))(*pairs)
    for i, sign in enumerate((1, -1, 1)):
        q = tuple((x * sign).astype(x.dtype) for x in inputs.q)
        truth = oracle.decode(q, *inputs.args[1:], layer=1, **inputs.static)
        oracle.assert_attention((out[i], lse[i]), truth, 1e-2)


def test_batched_cache_is_refused(inputs, implementation):
    run = decode(implementation, inputs.static)
    caches = jnp.stack([jnp.asarray(inputs.cache)] * 2)
    with pytest.raises(NotImplementedError, match="vmap of mla_decode over cache"):
        jax.vmap(lambda c: run(inputs.q, c, inputs.page_table, inputs.kv_lens))(caches)
    with pytest.raises(NotImplementedError, match="vmap of mla_decode over layer"):
        jax.vmap(lambda n: run(inputs.q, caches, inputs.page_table, inputs.kv_lens, layer=n))(jnp.arange(2))


def test_update_cache_is_refused():
    """It would copy the cache once for each mapped call."""
    cache, rope = jnp.zeros((2, 4, 576)), jnp.zeros((3, 2, 64))
    with pytest.raises(NotImplementedError, match="vmap of update_cache"):
        jax.vmap(lambda c, r, s: update_cache(cache, c, r, s))(
            jnp.zeros((3, 2, 512)), rope, jnp.zeros((3, 2), jnp.int32)
        )


def test_merge_states():
    """Rows are independent: a mapped axis is more of them; an unmapped side is shared."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 3, 4, 5, 8)).astype(np.float32)
    la, lb = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    got = jax.vmap(merge_states)(a, la, b, lb)
    for x, y in zip(got, merge_states(a, la, b, lb), strict=True):
        np.testing.assert_array_equal(x, y)
    got = jax.vmap(merge_states, in_axes=(0, 0, None, None))(a, la, b[0], lb[0])
    for i in range(3):
        for x, y in zip(got, merge_states(a[i], la[i], b[0], lb[0]), strict=True):
            np.testing.assert_array_equal(x[i], y)
