"""mla_sparse_decode: attention to chosen slots."""

import dataclasses
from functools import partial

import cases
import jax
import numpy as np
import oracle
import pytest
from helpers import assert_same_bits

from jax_mla import mla_decode, mla_sparse_decode, slots

OPERATION = "mla_sparse_decode"


def compiled(implementation):
    return jax.jit(partial(mla_sparse_decode, scale=cases.SCALE, implementation=implementation))


@dataclasses.dataclass
class Setup:
    """A cache of one sequence with NaN around it, and the slots of its tokens."""

    cache: np.ndarray
    slots: np.ndarray
    rng: np.random.Generator

    @classmethod
    def make(cls, tokens=300, cache_dtype="bfloat16", layers=None):
        rng = np.random.default_rng(0)
        cache, table = cases.make_cache(rng, (tokens,), page_size=64, cache_dtype=cache_dtype, layers=layers)
        return cls(cache, np.asarray(slots(table, np.arange(tokens, dtype=np.int32)[None], 64))[0], rng)

    def q(self, *shape, dtype="bfloat16"):
        return self.rng.standard_normal((*shape, 576), np.float32).astype(cases.dtype(dtype))

    def choose(self, *shape):
        return self.rng.choice(self.slots, shape).astype(np.int32)


@pytest.mark.parametrize("k", [1, 7, 64, 100, 192, 200])
def test_any_top_k(k, implementation):
    """Of the field's failures: top-k of 192, and of any number that is no multiple of 64: every index attended."""
    setup = Setup.make()
    q, indices = setup.q(3, 24), setup.choose(3, k)
    got = compiled(implementation)(q, setup.cache, indices)
    oracle.assert_attention(got, oracle.sparse_decode(q, setup.cache, indices, scale=cases.SCALE), 1e-2)


def test_masked_indices(implementation):
    """-1 and slots out of range are no token, and NaN behind them is not read; topk_lens cuts; rows may be empty."""
    setup = Setup.make()
    run = compiled(implementation)
    slots_total = setup.cache.shape[0] * 64
    q = setup.q(2, 3, 17)
    for _ in range(6):
        indices = setup.choose(2, 3, 100)
        wrong = setup.rng.choice([-1, -7, slots_total, 2**31 - 1, -(2**31)], indices.shape)
        indices = np.where(setup.rng.random(indices.shape) < 0.4, wrong, indices).astype(np.int32)
        indices[0, 1] = -1
        lens = setup.rng.choice([-1, 0, 1, 50, 99, 100, 1000], (2, 3)).astype(np.int32)
        sink = setup.rng.standard_normal(17).astype(np.float32) * 3
        arrays = {"topk_lens": lens, "sink": sink}
        got = run(q, setup.cache, indices, **arrays)
        truth = oracle.sparse_decode(q, setup.cache, indices, scale=cases.SCALE, **arrays)
        oracle.assert_attention(got, truth, 1e-2)


def test_sink_joins_the_denominator_and_leaves_lse_alone(implementation):
    setup = Setup.make()
    q, indices = setup.q(4, 12), setup.choose(4, 33)
    indices[2] = -1
    run = compiled(implementation)
    plain_out, plain_lse = run(q, setup.cache, indices)
    none = np.full(12, -np.inf, np.float32)
    out, lse = run(q, setup.cache, indices, sink=none)
    np.testing.assert_array_equal(np.asarray(lse), np.asarray(plain_lse))
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(plain_out, np.float32))
    out, lse = run(q, setup.cache, indices, sink=np.full(12, 1e30, np.float32))
    np.testing.assert_array_equal(np.asarray(out, np.float32), 0)
    np.testing.assert_array_equal(np.asarray(lse), np.asarray(plain_lse))


def test_duplicates_count_as_often_as_they_stand_there(implementation):
    setup = Setup.make()
    q, once = setup.q(1, 6), setup.choose(1, 5)
    run = compiled(implementation)
    out, lse = run(q, setup.cache, once)
    twice_out, twice_lse = run(q, setup.cache, np.concatenate([once, once], axis=1))
    np.testing.assert_allclose(np.asarray(twice_lse), np.asarray(lse) + np.log(2), atol=1e-5)
    np.testing.assert_allclose(np.asarray(twice_out, np.float32), np.asarray(out, np.float32), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", cases.DS_MLA, "float32"])
def test_layouts(cache_dtype, implementation):
    """fp8 with its k_scale a layer, fp8_ds_mla, fp32; stacked, with a layer; the pair of queries."""
    setup = Setup.make(100, cache_dtype, layers=2)
    q = setup.q(2, 24, dtype="float32" if cache_dtype == "float32" else "bfloat16")
    indices = setup.choose(2, 70)
    arrays = {"layer": np.int32(1)}
    if cache_dtype == "float8_e4m3fn":
        arrays["k_scale"] = np.float32([0.3, 1.7])
    run = compiled(implementation)
    truth = oracle.sparse_decode(q, setup.cache, indices, scale=cases.SCALE, **arrays)
    oracle.assert_attention(run(q, setup.cache, indices, **arrays), truth, 1e-2)
    oracle.assert_attention(run(cases.split(q), setup.cache, indices, **arrays), truth, 1e-2)
    _, lse = run(q, setup.cache, indices, **(arrays | {"layer": np.int32(2)}))
    np.testing.assert_array_equal(np.asarray(lse), -np.inf)


def test_all_tokens_equal_dense_decode(implementation):
    """Choosing every cached token is dense decode."""
    inputs = cases.make(cases.DecodeCase("", (200,), padding_pages=0))
    everything = np.asarray(slots(inputs.page_table, np.arange(200, dtype=np.int32)[None], 64))[:, None]
    got = compiled(implementation)(inputs.q, inputs.cache, everything)
    want = mla_decode(*inputs.args, implementation="xla", **inputs.static)
    oracle.assert_attention(got, tuple(np.asarray(x, np.float64) for x in want), 1e-2)


def test_same_bits_each_time(implementation):
    """Of the field's failures: top-k 2048, the same call many times: the same bits."""
    setup = Setup.make(2500)
    q, indices = setup.q(2, 16), setup.choose(2, 2048)
    run = compiled(implementation)
    first = run(q, setup.cache, indices)
    for _ in range(5):
        assert_same_bits(first, run(q, setup.cache, indices))


@pytest.mark.parametrize("lead, k", [((0,), 5), ((2,), 0), ((2, 0), 3)])
def test_empty_shapes(lead, k, implementation):
    q, cache = np.zeros((*lead, 4, 576), np.float32), np.zeros((2, 64, 576), np.float32)
    out, lse = compiled(implementation)(q, cache, np.zeros((*lead, k), np.int32))
    assert out.shape == (*lead, 4, 512) and lse.shape == (*lead, 4)
    assert not np.any(out) and np.all(np.asarray(lse) == -np.inf)
