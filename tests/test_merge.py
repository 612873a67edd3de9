"""merge_states and apply_sink."""

from functools import partial

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.test_util import check_grads

from jax_mla import apply_sink, merge_states

OPERATION = "merge_states"
DTYPES = ("float32", "bfloat16", "float16")


def compiled(implementation):
    return jax.jit(partial(merge_states, implementation=implementation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3, 512), (7, 128), (2, 3, 5, 65), (1, 1)])
def test_merging_parts_equals_the_whole(shape, dtype, implementation):
    """Attention over disjoint keys, merged, is attention over all of them."""
    rng = np.random.default_rng(0)
    *rows, width = shape
    q = rng.standard_normal((*rows, 16))
    keys, values = rng.standard_normal((*rows, 40, 16)), rng.standard_normal((*rows, 40, width))

    def attend(keys, values):
        scores = np.einsum("...d,...nd->...n", q, keys)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1)
        out = np.einsum("...n,...nd->...d", weights / total[..., None], values)
        return out, np.log(total) + scores.max(-1)

    parts = attend(keys[..., :7, :], values[..., :7, :]), attend(keys[..., 7:, :], values[..., 7:, :])
    operands = [x.astype(cases.dtype(d)) for part in parts for x, d in zip(part, (dtype, "float32"), strict=True)]
    out, lse = compiled(implementation)(*operands)
    assert out.dtype == dtype and lse.dtype == "float32"
    tolerance = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
    oracle.assert_attention((out, lse), attend(keys, values), tolerance)


def test_lse_is_natural(implementation):
    """Partial sums of 2 and 8 weigh 0.2 and 0.8; the merged lse is log 10."""
    out_a, out_b = np.full((1, 4), 1, np.float32), np.full((1, 4), 11, np.float32)
    out, lse = compiled(implementation)(out_a, np.log([2], dtype=np.float32), out_b, np.log([8], dtype=np.float32))
    np.testing.assert_allclose(out, 0.2 * 1 + 0.8 * 11, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(10), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_sides(dtype, implementation):
    """A side whose lse is -inf, +inf or NaN is empty whatever its out holds; two of them give out 0, lse -inf.

    Of the field's failures: two context chunks, one without keys for some queries, both lse -inf: NaN after the merge.
    """
    empties, full = [-np.inf, np.inf, np.nan], [0.0, 5.0, -700.0, 700.0]
    pairs = [(a, b) for a in empties + full for b in empties + full]
    lse_a, lse_b = np.float32(pairs).T
    rng = np.random.default_rng(1)
    clean_a, clean_b = rng.standard_normal((2, len(pairs), 40)).astype(cases.dtype(dtype))
    for poison in (np.nan, np.inf):
        out_a = np.where(np.isfinite(lse_a)[:, None], clean_a, cases.dtype(dtype).type(poison))
        out_b = np.where(np.isfinite(lse_b)[:, None], clean_b, cases.dtype(dtype).type(poison))
        out, lse = map(np.asarray, compiled(implementation)(out_a, lse_a, out_b, lse_b))
        for i, (a, b) in enumerate(pairs):
            if np.isfinite(a) and np.isfinite(b):
                weight = np.exp(a - np.logaddexp(a, b))
                want = clean_a[i].astype(float) * weight + clean_b[i].astype(float) * (1 - weight)
                np.testing.assert_allclose(out[i].astype(float), want, rtol=1e-2, atol=1e-2)
                np.testing.assert_allclose(lse[i], np.logaddexp(a, b), rtol=1e-6, atol=1e-6)
            elif np.isfinite(a) or np.isfinite(b):  # the full side, untouched
                np.testing.assert_array_equal(out[i], clean_a[i] if np.isfinite(a) else clean_b[i])
                assert lse[i] == np.float32(a if np.isfinite(a) else b)
            else:
                np.testing.assert_array_equal(out[i].astype(float), 0)
                assert lse[i] == -np.inf


def test_no_rows(implementation):
    out, lse = merge_states(*[np.zeros(s, np.float32) for s in [(0, 8), (0,)] * 2], implementation=implementation)
    assert out.shape == (0, 8) and lse.shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sink_joins_the_denominator(dtype):
    """A sink is one more key, of its logit and of value 0; it leaves lse alone; an empty row stays empty."""
    rng = np.random.default_rng(2)
    out = rng.standard_normal((4, 3, 8)).astype(cases.dtype(dtype))
    lse = rng.standard_normal((4, 3)).astype(np.float32) * 3
    sink = np.array([-np.inf, 0.5, 80], np.float32)
    lse[1], lse[2, 0], lse[3, 1] = -np.inf, np.nan, np.inf
    out[~np.isfinite(lse)] = np.nan
    got = np.asarray(jax.jit(apply_sink)(out, lse, sink)).astype(float)
    assert jax.jit(apply_sink)(out, lse, sink).dtype == dtype
    with np.errstate(over="ignore", invalid="ignore"):
        share = 1 / (1 + np.exp(sink.astype(float) - lse.astype(float)))
    want = np.where(np.isfinite(lse)[..., None], out.astype(float) * share[..., None], 0)
    np.testing.assert_allclose(got, want, rtol=1e-2 if dtype != "float32" else 1e-5, atol=1e-6)


def test_sink_after_merging_equals_sink_inside():
    """Merging two halves and then applying the sink is attention over everything with the sink."""
    rng = np.random.default_rng(3)
    q, rows, sink = rng.standard_normal((4, 576)), rng.standard_normal((30, 576)), rng.standard_normal(4)
    scale = cases.SCALE
    halves = [oracle.attend(q, part, part[:, :512], scale) for part in (rows[:11], rows[11:])]
    operands = [jnp.asarray(x[None], jnp.float32) for half in halves for x in half]
    out, lse = merge_states(*operands)
    want, want_lse = oracle.attend(q, rows, rows[:, :512], scale, sink)
    oracle.assert_attention((apply_sink(out, lse, jnp.float32(sink)), lse), (want[None], want_lse[None]), 1e-5)


def test_derivative(implementation):
    """Forward and backward, against finite differences; an empty side, whatever it holds, has the derivative 0."""
    rng = np.random.default_rng(5)
    out_a, out_b = rng.standard_normal((2, 3, 4), np.float32)
    lse_a, lse_b = rng.standard_normal((2, 3), np.float32)
    run = compiled(implementation)
    check_grads(run, (out_a, lse_a, out_b, lse_b), order=1, modes=("fwd", "rev"), atol=1e-2, rtol=1e-2)

    def loss(*operands):
        out, lse = run(*operands)
        return jnp.sum(out * jnp.arange(1.0, 13.0).reshape(3, 4)) + jnp.sum(lse)

    for empty in (-np.inf, np.inf, np.nan):
        gradients = jax.grad(loss, argnums=(0, 1, 2, 3))(out_a, np.full_like(lse_a, empty), out_b, lse_b)
        np.testing.assert_array_equal(gradients[0], 0)
        np.testing.assert_array_equal(gradients[1], 0)
        np.testing.assert_array_equal(gradients[2], np.arange(1.0, 13.0).reshape(3, 4))
        np.testing.assert_allclose(gradients[3], 1, rtol=1e-6)
