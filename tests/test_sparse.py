"""mla_sparse_decode: attention to chosen slots."""

import dataclasses
import mmap
from functools import partial
from pathlib import Path

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import assert_same_bits, on_gpu, served, served_or_refused

import jax_mla
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
    """-1 and slots out of range are no token, and NaN behind them is not read; topk_lens cuts; rows may be empty.

    A row of -1 with one slot among them is that slot's token, wherever it stands and without topk_lens.
    """
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

    indices, places = np.full((2, 3, 100), -1, np.int32), np.array([[0, 1, 31], [63, 64, 99]])
    np.put_along_axis(indices, places[..., None], setup.choose(2, 3, 1), axis=-1)
    truth = oracle.sparse_decode(q, setup.cache, indices, scale=cases.SCALE)
    oracle.assert_attention(run(q, setup.cache, indices), truth, 1e-2)


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
    with served_or_refused(OPERATION, implementation, q.dtype.name, cache_dtype):
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


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn", cases.DS_MLA])
def test_same_bits_each_time(cache_dtype, implementation):
    """Of the field's failures: top-k 2048, the same call many times: the same bits."""
    setup = Setup.make(2500, cache_dtype)
    q, indices = setup.q(2, 16), setup.choose(2, 2048)
    arrays = {"k_scale": np.float32(0.7)} if cache_dtype == "float8_e4m3fn" else {}
    run = compiled(implementation)
    with served_or_refused(OPERATION, implementation, "bfloat16", cache_dtype, 16):
        first = run(q, setup.cache, indices, **arrays)
        for _ in range(20):
            assert_same_bits(first, run(q, setup.cache, indices, **arrays))


@pytest.mark.parametrize("lead, k", [((0,), 5), ((2,), 0), ((2, 0), 3)])
def test_empty_shapes(lead, k, implementation):
    q, cache = np.zeros((*lead, 4, 576), np.float32), np.zeros((2, 64, 576), np.float32)
    out, lse = compiled(implementation)(q, cache, np.zeros((*lead, k), np.int32))
    assert out.shape == (*lead, 4, 512) and lse.shape == (*lead, 4)
    assert not np.any(out) and np.all(np.asarray(lse) == -np.inf)


def test_random_calls(implementation):
    """Shapes, dtypes, masks, lengths and sinks together; a short sequence, so that slots stand several times."""
    rng = np.random.default_rng(11)
    pairs = [
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float32", "float32"),
        ("bfloat16", "float8_e4m3fn"),
        ("float16", "float8_e4m3fn"),
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("bfloat16", cases.DS_MLA),
        ("float16", cases.DS_MLA),
    ]
    run = compiled(implementation)
    for q_dtype, cache_dtype in pairs * 2:
        heads, k = int(rng.choice([1, 5, 16, 24, 100, 128, 144])), int(rng.choice([1, 3, 63, 65, 300]))
        setup = Setup.make(int(rng.choice([2, 50, 300])), cache_dtype)
        q = setup.q(3, heads, dtype=q_dtype)
        indices = np.where(rng.random((3, k)) < rng.choice([0, 0.3, 0.9]), -1, setup.choose(3, k)).astype(np.int32)
        arrays = {"topk_lens": rng.integers(0, k + 2, 3).astype(np.int32)}
        arrays["sink"] = rng.standard_normal(heads).astype(np.float32)
        if "float8" in cache_dtype:
            arrays["k_scale"] = np.float32(rng.uniform(0.5, 1.5))
        if "float8" in q_dtype:
            arrays["q_scale"] = np.float32(rng.uniform(0.5, 1.5))
        with served_or_refused(OPERATION, implementation, q_dtype, cache_dtype, heads):
            got = run(q, setup.cache, indices, **arrays)
            truth = oracle.sparse_decode(q, setup.cache, indices, scale=cases.SCALE, **arrays)
            oracle.assert_attention(got, truth, cases.TOLERANCES[q_dtype])


def test_head_counts(implementation):
    """Head counts 1 to 128 and 160, each with a sink: every one of them where a platform chooses the variant."""
    counts = (*range(1, 129), 160) if implementation in ("cpu", "cuda") else (1, 6, 12, 17, 31, 96, 128, 160)
    setup = Setup.make(100)
    q, indices = setup.q(2, 160), setup.choose(2, 40)
    sink = np.linspace(-3, 3, 160, dtype=np.float32)
    out, lse = oracle.sparse_decode(q, setup.cache, indices, scale=cases.SCALE, sink=sink)
    run = compiled(implementation)
    for heads in counts:
        got = run(np.ascontiguousarray(q[:, :heads]), setup.cache, indices, sink=sink[:heads])
        oracle.assert_attention(got, (out[:, :heads], lse[:, :heads]), 1e-2)


@pytest.mark.leave_out("*:*")  # the variants share the addressing
def test_addresses_past_two_to_the_31(implementation):
    """slot * 576 past 2^31 elements: right values. On the CPU the pages that no slot is on never become resident."""
    dtype = "float8_e4m3fn" if served(OPERATION, implementation, "bfloat16", "float8_e4m3fn") else "bfloat16"
    setup = Setup.make(100, dtype)
    q, indices = setup.q(3, 24), setup.choose(3, 70)
    pages = 2**31 // (64 * 576) + 10
    new = pages - 1 - np.arange(len(setup.cache))
    if on_gpu():
        cache = jnp.zeros((pages, 64, 576), setup.cache.dtype).at[new].set(setup.cache)
    else:
        memory = np.frombuffer(mmap.mmap(-1, pages * 64 * 576 * setup.cache.itemsize), setup.cache.dtype)
        memory = memory.reshape(pages, 64, 576)
        memory[new] = setup.cache
        cache = jax.device_put(memory)
        assert cache.unsafe_buffer_pointer() == memory.ctypes.data
    moved = (new[indices // 64] * 64 + indices % 64).astype(np.int32)
    got = compiled(implementation)(q, cache, moved)
    oracle.assert_attention(got, oracle.sparse_decode(q, setup.cache, indices, scale=cases.SCALE), 1e-2)


def test_rows_of_a_prompt(implementation):
    """Thousands of query tokens, each with indices of its own: tokens in front of it, -1 where there are none."""
    setup = Setup.make(1500)
    tokens, k = 1500, 16
    q = setup.q(tokens, 2)
    positions = np.arange(tokens)[:, None] - setup.rng.integers(0, 40, (tokens, k))
    indices = np.where(positions >= 0, setup.slots[np.maximum(positions, 0)], -1).astype(np.int32)
    got = compiled(implementation)(q, setup.cache, indices)
    oracle.assert_attention(got, oracle.sparse_decode(q, setup.cache, indices, scale=cases.SCALE), 1e-2)


def example():
    """The function that docs/sparse.md shows."""
    page = (Path(__file__).parent.parent / "docs" / "sparse.md").read_text()
    names = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    return names["tree_indices"]


def test_chain_and_tree_of_drafted_tokens(implementation):
    """The example of docs/sparse.md: node i lies at position context + i. A chain equals causal dense decode."""
    tree_indices = example()
    inputs = cases.make(cases.DecodeCase("", (134,), q_lens=4, heads=12, padding_pages=0))
    own = np.asarray(slots(inputs.page_table, np.arange(134, dtype=np.int32)[None], 64))[0]
    run = compiled(implementation)

    got = run(inputs.q[0], inputs.cache, tree_indices(own, 130, [-1, 0, 1, 2]))
    want = oracle.decode(*inputs.args, scale=cases.SCALE)
    oracle.assert_attention(got, tuple(x[0] for x in want), 1e-2)

    parents = [-1, 0, 0, 1]  # two guesses after node 0, and one more after the first of them
    got = run(inputs.q[0], inputs.cache, tree_indices(own, 130, parents))
    rows = inputs.cache.reshape(-1, 576)
    for node, seen in enumerate([[0], [0, 1], [0, 2], [0, 1, 3]]):
        keys = rows[own[[*range(130), *(130 + n for n in seen)]]]
        truth = oracle.attend(
            oracle.as_float(inputs.q[0, node]), oracle.as_float(keys), oracle.as_float(keys[:, :512]), cases.SCALE
        )
        oracle.assert_attention((got[0][node], got[1][node]), truth, 1e-2)


def test_vmap(implementation):
    """Over queries and what is theirs, mapped or shared; not over the cache."""
    setup = Setup.make(100)
    q, indices = setup.q(3, 2, 12), setup.choose(3, 2, 20)
    lens = np.array([[3, 20], [0, 7], [20, 20]], np.int32)
    run = partial(mla_sparse_decode, scale=cases.SCALE, implementation=implementation)
    got = jax.jit(jax.vmap(lambda q, i, n: run(q, setup.cache, i, topk_lens=n)))(q, indices, lens)
    truth = oracle.sparse_decode(q, setup.cache, indices, scale=cases.SCALE, topk_lens=lens)
    oracle.assert_attention(got, truth, 1e-2)
    got = jax.jit(jax.vmap(lambda q: run(q, setup.cache, indices[0])))(q)
    shared = np.broadcast_to(indices[0], indices.shape)
    oracle.assert_attention(got, oracle.sparse_decode(q, setup.cache, shared, scale=cases.SCALE), 1e-2)
    latent, rope = cases.split(q)
    got = jax.vmap(lambda a, b, i: run((a, b), setup.cache, i))(latent, rope, indices)
    oracle.assert_attention(got, oracle.sparse_decode(q, setup.cache, indices, scale=cases.SCALE), 1e-2)
    caches = np.stack([setup.cache, setup.cache])
    with pytest.raises(NotImplementedError, match="vmap of mla_sparse_decode over cache"):
        jax.vmap(lambda c: run(q[0], c, indices[0]))(caches)


def test_no_derivative(implementation):
    setup = Setup.make(64)
    q, indices = setup.q(1, 4, dtype="float32"), setup.choose(1, 5)
    cache = np.zeros(setup.cache.shape, np.float32)
    if not served(OPERATION, implementation, "float32", "float32"):
        q, cache = q.astype(setup.cache.dtype), setup.cache

    def loss(q):
        return mla_sparse_decode(q, cache, indices, scale=cases.SCALE, implementation=implementation)[0].sum()

    with pytest.raises(NotImplementedError, match="mla_sparse_decode has no derivative"):
        jax.grad(loss)(q)


def test_export_round_trip():
    """Exported for several platforms, serialised, read back and called."""
    setup = Setup.make(100)
    args = setup.q(2, 24), setup.cache, setup.choose(2, 300)
    run = compiled(None)
    export = jax.export.export(run, platforms=("cpu", "cuda", "rocm"), disabled_checks=jax_mla.export_checks())
    exported = export(*args)
    assert "@jax_mla_sparse_decode" in exported.mlir_module()
    back = jax.export.deserialize(exported.serialize())
    with jax.default_device(jax.devices("cpu")[0]):
        assert_same_bits(back.call(*args), run(*args))


def test_a_row_has_the_bits_of_its_call_alone():
    """What a CPU cuts a row into follows from the number of rows and indices, and from no other row."""
    setup = Setup.make(300)
    q, indices = setup.q(70, 8), setup.choose(70, 600)
    order = setup.rng.permutation(70)
    run = compiled("cpu")
    with jax.default_device(jax.devices("cpu")[0]):
        out, lse = run(q, setup.cache, indices)
        assert_same_bits(run(q[order], setup.cache, indices[order]), (np.asarray(out)[order], np.asarray(lse)[order]))
