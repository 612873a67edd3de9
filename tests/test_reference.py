"""The reference in float64 is the truth: it equals the loops of oracle.py, which share no code with it."""

from functools import partial

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_mla import reference


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        yield


def exactly(function, *args, arrays=None, **static):
    run = jax.jit(partial(function, compute_dtype=jnp.float64, out_dtype=jnp.float64, **static))
    return run(*args, **(arrays or {}))


@pytest.mark.parametrize("case", cases.DECODE_CASES[7::3], ids=lambda case: case.name)
def test_decode(case):
    inputs = cases.make(case)
    got = exactly(reference.mla_decode, *inputs.args, arrays=inputs.arrays, **inputs.static)
    assert got[0].dtype == got[1].dtype == "float64"
    oracle.assert_attention(got, oracle.decode(*inputs.args, **inputs.arrays, **inputs.static), 1e-12, 1e-12)


def test_sparse_prefill_and_context():
    rng = np.random.default_rng(0)
    lengths, cu = (100, 0, 37), np.array([0, 2, 3, 7], np.int32)
    cache, table = cases.make_cache(rng, lengths, page_size=16, cache_dtype="float8_e4m3fn")
    q = rng.standard_normal((7, 6, 576)).astype(cases.dtype("bfloat16"))
    indices = np.asarray(reference.slots(table, rng.integers(-9, 37, (3, 50)), 16))[[0, 2]]
    arrays = {"sink": rng.standard_normal(6).astype(np.float32), "k_scale": np.float32(0.7)}
    got = exactly(reference.mla_sparse_decode, q[:2], cache, indices, arrays=arrays, scale=cases.SCALE)
    truth = oracle.sparse_decode(q[:2], cache, indices, scale=cases.SCALE, **arrays)
    oracle.assert_attention(got, truth, 1e-12, 1e-12)

    q = q[..., :192]
    w_kv_b = (rng.standard_normal((512, 6, 256)) / 22).astype(cases.dtype("bfloat16"))
    plan = reference.plan_context(lengths, workspace_tokens=48, page_size=16)
    arrays = {"cu_q_lens": cu, "k_scale": np.float32(0.7)}
    got = exactly(reference.mla_context, q, cache, table, plan, w_kv_b, arrays=arrays, scale=0.07)
    truth = oracle.context(q, cache, table, lengths, w_kv_b, scale=0.07, **arrays)
    oracle.assert_attention(got, truth, 1e-12, 1e-12)

    k, v = (rng.standard_normal((9, 6, n)).astype(cases.dtype("float16")) for n in (192, 128))
    cu_kv = np.array([0, 5, 5, 9], np.int32)
    for causal in (True, False):
        got = exactly(reference.mla_prefill, q, k, v, cu, cu_kv, causal=causal, scale=0.07)
        oracle.assert_attention(got, oracle.prefill(q, k, v, cu, cu_kv, causal=causal, scale=0.07), 1e-12, 1e-12)


def test_merge():
    rng = np.random.default_rng(1)
    q, rows = rng.standard_normal((4, 576)), rng.standard_normal((30, 576))
    halves = [oracle.attend(q, part, part[:, :512], 0.1) for part in (rows[:11], rows[11:])]
    got = exactly(reference.merge_states, *halves[0], *halves[1])
    oracle.assert_attention(got, oracle.attend(q, rows, rows[:, :512], 0.1), 1e-12, 1e-12)


def test_gather_cache():
    """Rows of chosen slots in a wanted dtype, k_scale applied; zeros where there is no slot."""
    rng = np.random.default_rng(2)
    for kind in ("bfloat16", "float8_e4m3fn", cases.DS_MLA):
        cache = cases.encode(rng.standard_normal((2, 3, 4, 576)), kind)
        scale = np.float32([0.3, 0.6]) if kind == "float8_e4m3fn" else None
        slots = np.array([[0, 11, -1], [12, 5, 2**31 - 1]], np.int32)
        got = reference.gather_cache(cache, slots, layer=1, k_scale=scale, dtype=jnp.float64)
        rows = oracle.dequantise(cache, scale)[1].reshape(12, 576)
        inside = (slots >= 0) & (slots < 12)
        want = np.where(inside[..., None], rows[np.where(inside, slots, 0)], 0)
        np.testing.assert_allclose(got, want, rtol=1e-12)
        assert reference.gather_cache(cache, slots, layer=1, dtype=jnp.bfloat16).dtype == "bfloat16"
