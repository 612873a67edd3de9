"""mla_prefill: ragged attention with keys of 192 and values of 128."""

from functools import partial

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import assert_same_bits

from jax_mla import merge_states, mla_prefill

OPERATION = "mla_prefill"
SCALE = 192**-0.5
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])


def compiled(implementation, **static):
    return jax.jit(partial(mla_prefill, scale=SCALE, implementation=implementation, **static))


def ragged(q_lens, kv_lens):
    return tuple(np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (q_lens, kv_lens))


def operands(tokens, stored, heads, dtype="bfloat16", seed=0):
    """q [T, H, 192], k [S, H, 192], and the up-projection [S, H, 256] whose second half is v."""
    rng = np.random.default_rng(seed)
    shapes = (tokens, heads, 192), (stored, heads, 192), (stored, heads, 256)
    return tuple(rng.standard_normal(shape, np.float32).astype(cases.dtype(dtype)) for shape in shapes)


def values(kv_up):
    return np.ascontiguousarray(kv_up[..., 128:])


@CAUSAL
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("heads", [1, 12, 24])
def test_against_the_oracle(heads, dtype, causal, implementation):
    """Requests longer than, as long as and shorter than their keys, and of one token."""
    cu = ragged((70, 1, 30, 5), (70, 40, 100, 2))
    q, k, kv_up = operands(106, 212, heads, dtype)
    got = compiled(implementation, causal=causal)(q, k, values(kv_up), *cu)
    assert got[0].dtype == dtype and got[1].dtype == "float32"
    truth = oracle.prefill(q, k, values(kv_up), *cu, causal=causal, scale=SCALE)
    oracle.assert_attention(got, truth, cases.TOLERANCES[dtype])


@CAUSAL
def test_random_ragged_batches(causal, implementation):
    """One compiled program over many batches; what no request owns is NaN.

    Of the field's failures: a request with queries and no keys; NaN in V past the used length.
    """
    rng = np.random.default_rng(1)
    q, k, kv_up = operands(60, 90, 4)
    run = compiled(implementation, causal=causal)
    for trial in range(12):
        q_lens, kv_lens = rng.integers(0, 12, 5), rng.integers(0, 18, 5)
        kv_lens[trial % 5] = 0
        cu_q, cu_kv = ragged(q_lens, kv_lens)
        q2, k2, v2 = q.copy(), k.copy(), values(kv_up)
        q2[cu_q[-1] :], k2[cu_kv[-1] :], v2[cu_kv[-1] :] = np.nan, np.nan, np.nan
        truth = oracle.prefill(q2, k2, v2, cu_q, cu_kv, causal=causal, scale=SCALE)
        oracle.assert_attention(run(q2, k2, v2, cu_q, cu_kv), truth, 1e-2)


def test_value_offset_reads_the_up_projection_in_place(implementation):
    """v may be the whole up-projection [S, H, 256] with value_offset=128: the same bits, NaN in the rest unread."""
    cu = ragged((20, 9), (25, 9))
    q, k, kv_up = operands(29, 34, 6)
    poisoned = kv_up.copy()
    poisoned[..., :128] = np.nan
    sliced = compiled(implementation, causal=True)(q, k, values(kv_up), *cu)
    whole = compiled(implementation, causal=True, value_offset=128)(q, k, poisoned, *cu)
    assert_same_bits(sliced, whole)


def test_nan_stays_with_its_request(implementation):
    """NaN among one request's keys and values, or in its later tokens, reaches no row that does not see it."""
    cu = ragged((4, 6, 5), (4, 6, 5))
    q, k, kv_up = operands(15, 15, 3)
    truth = oracle.prefill(q, k, values(kv_up), *cu, causal=True, scale=SCALE)
    k2, v2 = k.copy(), values(kv_up)
    k2[6], v2[6] = np.nan, np.nan  # the third token of the second request
    out, lse = compiled(implementation, causal=True)(q, k2, v2, *cu)
    clean = np.array([0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14])
    oracle.assert_attention((out[clean], lse[clean]), tuple(x[clean] for x in truth), 1e-2)
    assert np.isnan(np.asarray(out[6:10], np.float32)).all()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3fnuz"])
def test_fp8_with_scales(dtype, implementation):
    """fp8 inputs carry q_scale, k_scale and v_scale, default 1; the result is bf16."""
    cu = ragged((20, 9), (25, 9))
    q, k, kv_up = operands(29, 34, 6, dtype)
    scales = {"q_scale": np.float32(1.5), "k_scale": np.float32(0.5), "v_scale": np.float32(3)}
    wide = [oracle.as_float(x) for x in (q, k, values(kv_up))]
    for given in (scales, {}):
        run = compiled(implementation, causal=True)
        got = run(q, k, values(kv_up), *cu, **given)
        assert got[0].dtype == "bfloat16"
        scaled = [x * float(s) for x, s in zip(wide, given.values() or (1, 1, 1), strict=True)]
        oracle.assert_attention(got, oracle.prefill(*scaled, *cu, causal=True, scale=SCALE), 4e-2)


@CAUSAL
def test_carry_is_merged_into(causal, implementation):
    """carry=(out, lse) in fp32: as merging afterwards; an empty carry changes nothing, an empty result leaves it."""
    cu = ragged((20, 9, 3), (25, 9, 0))
    q, k, kv_up = operands(32, 34, 6)
    rng = np.random.default_rng(2)
    out, lse = rng.standard_normal((32, 6, 128)).astype(np.float32), rng.standard_normal((32, 6)).astype(np.float32)
    lse[3], out[3] = -np.inf, np.nan
    run = compiled(implementation, causal=causal)
    merged = run(q, k, values(kv_up), *cu, carry=(out, lse))
    assert merged[0].dtype == "float32"
    exact = run(q.astype(np.float32), k.astype(np.float32), values(kv_up).astype(np.float32), *cu)
    want = merge_states(jnp.asarray(out), jnp.asarray(lse), *exact, implementation="xla")
    oracle.assert_attention(merged, tuple(np.asarray(x, np.float64) for x in want), 1e-5, 1e-5)
    np.testing.assert_array_equal(merged[0][29:], out[29:])
    np.testing.assert_array_equal(merged[1][29:], lse[29:])


@pytest.mark.parametrize("tokens, stored, batch", [(0, 5, 1), (5, 0, 1), (0, 0, 0), (3, 4, 0)])
def test_empty_shapes(tokens, stored, batch, implementation):
    q, k, kv_up = operands(tokens, stored, 4)
    cu_q, cu_kv = (np.array([0] + [n] * batch, np.int32) for n in (tokens, stored))
    out, lse = compiled(implementation, causal=False)(q, k, values(kv_up), cu_q, cu_kv)
    assert out.shape == (tokens, 4, 128) and lse.shape == (tokens, 4)
    if not stored or not batch:
        assert not np.any(np.asarray(out, np.float32)) and np.all(np.asarray(lse) == -np.inf)
