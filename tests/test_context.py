"""plan_context and mla_context: attention to a long cached context, chunk by chunk."""

from functools import partial

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from helpers import assert_same_bits, native_only, on_gpu, served

from jax_mla import _ffi, explain, merge_states, mla_context, mla_prefill, pack_kv, plan_context, reference, validate
from jax_mla.context import gather_context

OPERATION = "mla_context"
# The gather's kernels have fp32 where those of the attention may not.
pytestmark = pytest.mark.filterwarnings("ignore:mla_prefill runs through XLA on this GPU")
SCALE = 192**-0.5
HEADS, PAGE = 4, 16
CACHE_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e4m3fnuz", cases.DS_MLA)


def pieces(plan):
    """Of each chunk that is not empty, the (request, first token, length) of its pieces."""
    starts, lengths = np.asarray(plan.starts), np.diff(np.asarray(plan.cu_kv_lens), axis=1)
    chunks = [[(b, int(s[b]), int(n[b])) for b in np.flatnonzero(n)] for s, n in zip(starts, lengths, strict=True)]
    return [chunk for chunk in chunks if chunk]


def compiled(implementation):
    return jax.jit(partial(mla_context, scale=SCALE, implementation=implementation))


def setup(lengths, q_lens, cache_dtype="bfloat16", dtype="bfloat16", layers=None, page_size=PAGE):
    rng = np.random.default_rng(0)
    cache, table = cases.make_cache(rng, lengths, page_size=page_size, cache_dtype=cache_dtype, layers=layers)
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    q = rng.standard_normal((cu_q_lens[-1], HEADS, 192), np.float32).astype(cases.dtype(dtype))
    w_kv_b = (rng.standard_normal((512, HEADS, 256), np.float32) / np.sqrt(512)).astype(cases.dtype(dtype))
    return q, cache, table, w_kv_b, cu_q_lens


def test_rule_of_the_chunks():
    """Contexts [200, 48, 32, 0], page 16, 128 tokens a chunk: [128], [72 (continued) + 48], [32]."""
    plan = plan_context([200, 48, 32, 0], workspace_tokens=128, page_size=16)
    assert pieces(plan) == [[(0, 0, 128)], [(0, 128, 72), (1, 0, 48)], [(2, 0, 32)]]
    assert plan.starts.shape == (4, 4) and plan.cu_kv_lens.shape == (4, 5)


@pytest.mark.parametrize("workspace, page", [(128, 16), (16, 16), (100, 7), (64, 64), (1000, 64), (65, 64)])
def test_chunks_of_random_contexts(workspace, page):
    """Every token once, in order, within the workspace; cuts aligned to pages; only a chunk's first piece continues."""
    rng = np.random.default_rng(workspace)
    for _ in range(20):
        lengths = rng.choice([0, -2, 1, page - 1, page, page + 1, workspace, 3 * workspace + 5, 50], 6)
        chunks = pieces(plan_context(lengths, workspace_tokens=workspace, page_size=page))
        seen = dict.fromkeys(range(6), 0)
        for i, chunk in enumerate(chunks):
            assert sum(n for *_, n in chunk) <= workspace
            for j, (b, start, n) in enumerate(chunk):
                assert start == seen[b] and start % page == 0
                assert start == 0 or j == 0
                seen[b] += n
                if seen[b] < lengths[b]:  # cut short: the chunk is closed, and not a page more would have fitted
                    assert j == len(chunk) - 1 and sum(m for *_, m in chunk) + page > workspace
            order = [b for b, *_ in chunk]
            assert order == sorted(order) and (i == 0 or order[0] >= chunks[i - 1][-1][0])
        assert seen == {b: max(int(n), 0) for b, n in enumerate(lengths)}


def test_number_of_chunks_is_a_power_of_two():
    """So that steps share compiled programs; and the plan is a pytree whose shapes say it all."""
    for tokens, chunks in ((0, 1), (100, 1), (300, 4), (128 * 5, 8)):
        plan = plan_context([tokens, 0], workspace_tokens=128, page_size=16)
        assert plan.starts.shape == (chunks, 2)
        assert jax.tree.structure(plan) == jax.tree.structure(plan_context([5], workspace_tokens=128, page_size=16))


def assert_same_plan(a, b):
    assert (a.workspace_tokens, a.page_size) == (b.workspace_tokens, b.page_size)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype == "int32"
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("workspace, page", [(128, 16), (16, 16), (100, 7), (64, 64), (65, 64)])
def test_device_makes_the_plan_of_the_host(workspace, page):
    """The greedy rule on the host and the closed form on the device, within the bound of the chunks."""
    rng = np.random.default_rng(page)
    sizes = {"workspace_tokens": workspace, "page_size": page}
    bound = 6 * (3 * workspace + 5) // (workspace - page + 1) + 1
    on_device = jax.jit(lambda lengths: plan_context(lengths, **sizes, max_chunks=bound))
    for i in range(50):
        choices = [0, -2, 1, page - 1, page, page + 1, workspace, workspace + 1, 3 * workspace + 5, 50]
        lengths = rng.choice(choices, 6) if i else np.full(6, 3 * workspace + 5)
        plan = plan_context(lengths, **sizes, max_chunks=bound)
        assert plan.num_chunks == len(pieces(plan)) <= bound
        assert_same_plan(on_device(jnp.asarray(lengths, jnp.int32)), plan)
    assert on_device._cache_size() == 1


def test_context_past_the_last_chunk():
    """A plan made on the device with too little room says so, and holds the chunks before."""
    lengths, sizes = jnp.array([200, 48, 32], jnp.int32), {"workspace_tokens": 64, "page_size": 16}
    whole = plan_context(lengths, **sizes)
    plan = jax.jit(lambda lengths: plan_context(lengths, **sizes, max_chunks=2))(lengths)
    assert plan.max_chunks == 2 and plan.num_chunks == whole.num_chunks == 5
    np.testing.assert_array_equal(plan.cu_kv_lens, whole.cu_kv_lens[:2])
    cache = jnp.zeros((20, 16, 576), jnp.bfloat16)
    validate(cache, context=whole)
    with pytest.raises(ValueError, match="context has room for 2 chunks and takes 5"):
        validate(cache, context=plan)


def test_workspace_holds_a_page():
    with pytest.raises(ValueError, match="workspace_tokens is 15"):
        plan_context([3], workspace_tokens=15, page_size=16)


@pytest.mark.parametrize("workspace", [16, 48, 128, 1024])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_chunks_add_up_to_the_whole(dtype, workspace, implementation):
    """Any workspace gives attention over the whole context; requests without context are empty rows."""
    lengths, q_lens = (200, 48, 0, 33, 1), (3, 1, 2, 0, 4)
    q, cache, table, w_kv_b, cu = setup(lengths, q_lens, dtype, dtype)
    plan = plan_context(lengths, workspace_tokens=workspace, page_size=PAGE)
    got = compiled(implementation)(q, cache, table, plan, w_kv_b, cu_q_lens=cu)
    assert got[0].dtype == dtype and got[1].dtype == "float32"
    truth = oracle.context(q, cache, table, lengths, w_kv_b, cu_q_lens=cu, scale=SCALE, dtype=cases.dtype(dtype))
    oracle.assert_attention(got, truth, {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-4}[dtype])


@pytest.mark.parametrize("workspace", [4, 8, 64])
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn"])
def test_thirteen_tokens_on_pages_of_four(cache_dtype, workspace, implementation):
    """What lies behind the last token, NaN on its own page and on those that the table is padded with, is not read."""
    lengths, q_lens = (13,), (3,)
    q, cache, table, w_kv_b, cu = setup(lengths, q_lens, cache_dtype, page_size=4)
    assert np.isnan(cache[table[0, 3]].astype(np.float32)).all(axis=-1).tolist() == [False, True, True, True]
    plan = plan_context(lengths, workspace_tokens=workspace, page_size=4)
    got = compiled(implementation)(q, cache, table, plan, w_kv_b, cu_q_lens=cu)
    truth = oracle.context(q, cache, table, lengths, w_kv_b, cu_q_lens=cu, scale=SCALE, dtype=ml_dtypes.bfloat16)
    oracle.assert_attention(got, truth, 1e-2)


@pytest.mark.parametrize("k_scale", [0.5, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scale_of_an_fp8_cache(dtype, k_scale, implementation):
    """Latents and rope keys are multiplied by k_scale, in one chunk and in many."""
    lengths, q_lens = (100, 0, 50), (2, 2, 3)
    q, cache, table, w_kv_b, cu = setup(lengths, q_lens, "float8_e4m3fn", dtype)
    arrays = {"cu_q_lens": cu, "k_scale": np.float32(k_scale)}
    truth = oracle.context(q, cache, table, lengths, w_kv_b, **arrays, scale=SCALE, dtype=cases.dtype(dtype))
    for workspace in (32, 256):
        plan = plan_context(lengths, workspace_tokens=workspace, page_size=PAGE)
        got = compiled(implementation)(q, cache, table, plan, w_kv_b, **arrays)
        oracle.assert_attention(got, truth, 1e-2 if dtype == "bfloat16" else 2e-3)


def test_chunk_sizes_agree(implementation):
    """Merged in fp32: one chunk and many give the same to 1e-5."""
    lengths, q_lens = (200, 48, 33), (3, 1, 2)
    q, cache, table, w_kv_b, cu = setup(lengths, q_lens, "float32", "float32")
    run = compiled(implementation)
    results = [
        run(q, cache, table, plan_context(lengths, workspace_tokens=w, page_size=PAGE), w_kv_b, cu_q_lens=cu)
        for w in (32, 512)
    ]
    oracle.assert_attention(results[0], tuple(np.asarray(x, np.float64) for x in results[1]), 1e-5, 1e-5)


def scale_of(cache_dtype, layers=None):
    """k_scale where the cache has one; of two layers 0.5 and 2."""
    if "float8" not in cache_dtype:
        return {}
    return {"k_scale": np.array([0.5, 2], np.float32) if layers else np.float32(0.5)}


@native_only
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_gathered_rows(cache_dtype, dtype, implementation):
    """Bit for bit the reference's: of every layout and layer, zero past the pieces and on pages out of range."""
    lengths, sizes = (70, 0, 33, 200), {"workspace_tokens": 96, "page_size": PAGE}
    plan = plan_context(lengths, **sizes)
    for layers in (None, 2):
        _, cache, table, *_ = setup(lengths, (1, 1, 1, 1), cache_dtype, layers=layers)
        table[0, 1], table[3, 2] = -1, cache.shape[-3]
        for layer in (0, 1, 2, -1) if layers else (None,):
            arrays = scale_of(cache_dtype, layers) | ({} if layer is None else {"layer": layer})
            for starts, cu_kv_lens in zip(plan.starts, plan.cu_kv_lens, strict=True):
                chunk = (cache, table, starts, cu_kv_lens)
                options = {"workspace_tokens": 96, "dtype": cases.dtype(dtype)}
                got = gather_context(*chunk, **options, **arrays, implementation=implementation)
                rows, request, _ = reference.gather_context(*chunk, **options, **arrays)
                assert_same_bits(got, (rows[:, :512], rows[:, 512:]))
                assert np.all(np.isfinite(np.asarray(got[0], np.float32)))
                assert (np.asarray(request) >= 0).any() == (layer not in (2, -1) and cu_kv_lens[-1] > 0)


@native_only
def test_gather_of_garbage(implementation):
    """A plan that belongs to other arrays gives rows of zeros or of other tokens, never an access out of bounds."""
    _, cache, table, *_ = setup((70, 33), (1, 1))
    cache = np.nan_to_num(cache.astype(np.float32)).astype(cache.dtype)
    rng = np.random.default_rng(0)
    limits = np.iinfo(np.int32)
    for _ in range(30):
        starts = rng.choice([limits.min, -1, 0, 5, 1000, limits.max], 2).astype(np.int32)
        cu_kv_lens = rng.choice([limits.min, -1, 0, 7, 96, limits.max], 3).astype(np.int32)
        got = gather_context(
            cache, table, starts, cu_kv_lens, workspace_tokens=96, dtype="bfloat16", implementation=implementation
        )
        assert np.all(np.isfinite(np.asarray(got[0], np.float32)))


@native_only
@pytest.mark.parametrize("weights", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_native_parts_are_the_generic_path(cache_dtype, weights, implementation):
    """Keys and values bit for bit, chunk by chunk, and the merged result: a request over five chunks among others."""
    lengths, q_lens = (40, 0, 270, 33, 0), (2, 1, 3, 1, 2)
    q, cache, table, w_kv_b, cu = setup(lengths, q_lens, cache_dtype, "float32", layers=2)
    cache, table, w_kv_b = (jnp.asarray(x) for x in (cache, table, w_kv_b.astype(cases.dtype(weights))))
    plan = plan_context(lengths, workspace_tokens=64, page_size=PAGE)
    assert sum(any(b == 2 for b, *_ in chunk) for chunk in pieces(plan)) == 5
    arrays = {"layer": np.int32(1)} | scale_of(cache_dtype, layers=2)
    options = {"workspace_tokens": 64, "dtype": w_kv_b.dtype}

    @jax.jit
    def native(starts, cu_kv_lens):
        latent, rope = gather_context(
            cache, table, starts, cu_kv_lens, **options, **arrays, implementation=implementation
        )
        kv_up = reference.up_project(latent, w_kv_b).astype(q.dtype)
        return pack_kv(kv_up, rope.astype(q.dtype), implementation=implementation), kv_up[..., 128:]

    @jax.jit
    def generic(starts, cu_kv_lens):
        rows, _, _ = reference.gather_context(cache, table, starts, cu_kv_lens, **options, **arrays)
        kv_up = jnp.einsum("nl,lhv->nhv", rows[:, :512], w_kv_b, precision="highest")
        rope = jnp.broadcast_to(rows[:, None, 512:], (64, HEADS, 64))
        return jnp.concatenate([kv_up[..., :128], rope], axis=-1).astype(q.dtype), kv_up[..., 128:].astype(q.dtype)

    for chunk in zip(plan.starts, plan.cu_kv_lens, strict=True):
        assert_same_bits(native(*chunk), generic(*chunk))
    operands = (q, cache, table, plan, w_kv_b)
    got = compiled(implementation)(*operands, cu_q_lens=cu, **arrays)
    want = compiled("xla")(*operands, cu_q_lens=cu, **arrays)
    oracle.assert_attention(got, tuple(np.asarray(x, np.float64) for x in want), 1e-5, 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_up_projection_in_blocks_of_rows(dtype):
    """On the CPU; the same bits as all rows at once."""
    rng = np.random.default_rng(0)
    latent = jnp.asarray(rng.standard_normal((384, 512), np.float32), dtype)
    weights = jnp.asarray(rng.standard_normal((512, HEADS, 256), np.float32), dtype)
    whole = jax.jit(partial(jnp.einsum, "nl,lhv->nhv", precision="highest"))(latent, weights)
    assert_same_bits([jax.jit(reference.up_project)(latent, weights)], [whole])


def test_one_chunk_is_attention_to_it(implementation):
    """Not merged into anything, and a request without context is an empty row all the same."""
    lengths, q_lens = (40, 0, 17), (2, 1, 3)
    q, cache, table, w_kv_b, cu = setup(lengths, q_lens)
    plan = plan_context(lengths, workspace_tokens=64, page_size=PAGE)
    assert plan.max_chunks == 1
    got = compiled(implementation)(q, cache, table, plan, w_kv_b, cu_q_lens=cu)
    roomy = plan_context(lengths, workspace_tokens=64, page_size=PAGE, max_chunks=4)
    merged = compiled(implementation)(q, cache, table, roomy, w_kv_b, cu_q_lens=cu)
    oracle.assert_attention(got, tuple(np.asarray(x, np.float64) for x in merged), 1e-2, 1e-5)
    assert np.all(np.asarray(got[1])[2] == -np.inf)


@native_only
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_one_chunk_has_the_bits_of_prefill(dtype, implementation):
    """mla_prefill over the same rows gathered, projected up and packed by themselves."""
    if not served("mla_prefill", implementation.partition(":")[0], dtype, dtype):
        pytest.skip("no native attention")
    lengths, q_lens = (40, 0, 17), (2, 1, 3)
    q, cache, table, w_kv_b, cu = (jnp.asarray(x) for x in setup(lengths, q_lens, dtype, dtype))
    plan = plan_context(lengths, workspace_tokens=64, page_size=PAGE)
    assert plan.max_chunks == 1
    got = compiled(implementation)(q, cache, table, plan, w_kv_b, cu_q_lens=cu)

    @jax.jit
    def packed(starts, cu_kv_lens):
        latent, rope = gather_context(
            cache, table, starts, cu_kv_lens, workspace_tokens=64, dtype=dtype, implementation=implementation
        )
        kv_up = reference.up_project(latent, w_kv_b)
        return pack_kv(kv_up, rope, implementation=implementation), kv_up

    cu_kv_lens = plan.cu_kv_lens[0]
    k, kv_up = packed(plan.starts[0], cu_kv_lens)
    want = mla_prefill(q, k, kv_up, cu, cu_kv_lens, causal=False, scale=SCALE, value_offset=128)
    assert_same_bits(got, want)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("workspace", [32, 512])
def test_carry_that_is_not_donated_stays(workspace, jitted, implementation):
    """A carry of JAX's own arrays has its bits after the call, which merges into a copy."""
    lengths, q_lens = (150, 0, 17), (2, 1, 3)
    q, cache, table, w_kv_b, cu = setup(lengths, q_lens, "float32", "float32")
    rng = np.random.default_rng(5)
    shapes = (6, HEADS, 128), (6, HEADS)
    state = tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    before = tuple(np.array(x, copy=True) for x in state)
    run = partial(mla_context, scale=SCALE, implementation=implementation)
    run = jax.jit(run) if jitted else run
    plan = plan_context(lengths, workspace_tokens=workspace, page_size=PAGE)
    out, lse = run(q, cache, table, plan, w_kv_b, cu_q_lens=cu, carry=state)
    assert not np.array_equal(out, before[0]) and not np.array_equal(lse, before[1])
    assert_same_bits(state, before)


def test_carry(implementation):
    """A state of other keys comes merged, in fp32; rows without context keep it bit for bit."""
    lengths, q_lens = (150, 0, 17), (2, 1, 3)
    q, cache, table, w_kv_b, cu = setup(lengths, q_lens, "float32", "float32")
    rng = np.random.default_rng(5)
    state = rng.standard_normal((6, HEADS, 128), np.float32), rng.standard_normal((6, HEADS), np.float32)
    state[1][0] = -np.inf
    for workspace in (64, 512):
        plan = plan_context(lengths, workspace_tokens=workspace, page_size=PAGE)
        run = compiled(implementation)
        got = run(q, cache, table, plan, w_kv_b, cu_q_lens=cu, carry=state)
        want = merge_states(*state, *run(q, cache, table, plan, w_kv_b, cu_q_lens=cu), implementation="xla")
        assert got[0].dtype == "float32"
        oracle.assert_attention(got, tuple(np.asarray(x, np.float64) for x in want), 1e-5, 1e-5)
        assert_same_bits([x[2] for x in got], [x[2] for x in state])


def test_lengths_change_without_recompilation(implementation):
    """Planned on the device, from no context at all to as many chunks as there is room for: one program."""
    q_lens, sizes = (3, 1, 2), {"workspace_tokens": 64, "page_size": PAGE}
    q, cache, table, w_kv_b, cu = setup((200, 48, 33), q_lens, "float32", "float32")

    @jax.jit
    def step(lengths):
        plan = plan_context(lengths, **sizes, max_chunks=8)
        return mla_context(q, cache, table, plan, w_kv_b, cu_q_lens=cu, scale=SCALE, implementation=implementation)

    for lengths in ((200, 48, 33), (0, 0, 0), (1, 0, 33), (128, 48, 16)):
        truth = oracle.context(q, cache, table, lengths, w_kv_b, cu_q_lens=cu, scale=SCALE)
        oracle.assert_attention(step(jnp.array(lengths, jnp.int32)), truth, 1e-4)
    assert step._cache_size() == 1


@native_only
def test_memory_does_not_grow_with_the_context(implementation):
    """Beside operands and results: the workspace, one up-projection, and the carry, from 16k to 512k cached tokens.

    Where the attention takes whole keys alone, these too.
    """
    if not served("mla_prefill", implementation, "bfloat16", "bfloat16"):
        pytest.skip("no native attention")
    tokens, heads, workspace, page = 512, 24, 4096, 64

    def temporary(cached):
        pages = cached // page
        shapes = (
            jax.ShapeDtypeStruct((tokens, heads, 192), jnp.bfloat16),
            jax.ShapeDtypeStruct((pages, page, 576), jnp.bfloat16),
            jax.ShapeDtypeStruct((1, pages), jnp.int32),
            jax.ShapeDtypeStruct((512, heads, 256), jnp.bfloat16),
        )

        def run(q, cache, table, w_kv_b, cu_q_lens, lengths):
            plan = plan_context(lengths, workspace_tokens=workspace, page_size=page, max_chunks=cached // workspace + 1)
            options = {"cu_q_lens": cu_q_lens, "scale": SCALE, "implementation": implementation}
            return mla_context(q, cache, table, plan, w_kv_b, **options)

        lens = jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        return jax.jit(run).lower(*shapes, *lens).compile().memory_analysis().temp_size_in_bytes

    row = explain("mla_prefill", target=implementation.partition(":")[0]).row
    up_projection = workspace * heads * (256 if row.key_parts else 256 + 192) * 2
    expected = workspace * 576 * 2 + up_projection + tokens * heads * (128 + 1) * 4
    if jax.__version_info__ < (0, 12):  # XLA's CPU multiplied bf16 by way of float32 copies of the weights ..
        expected += 512 * heads * 256 * 4
        if not on_gpu():
            expected += workspace * 512 * 4  # .. and of the latents
    if on_gpu():
        expected += 32 * 1024 * 1024  # that XLA gives cuBLAS on Hopper, 4 MiB before
    # Two forms of the loop: of few chunks a step for each that there may be, of many as many steps as there are.
    for fewer, more in ((16, 48), (128, 512)):
        small, large = temporary(fewer * 1024), temporary(more * 1024)
        assert small < 1.05 * expected, f"{small} bytes, expected no more than {expected}"
        assert abs(large - small) < 0.01 * expected, f"{large} bytes of {more}k tokens, {small} of {fewer}k"


@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", cases.DS_MLA])
def test_fp8_cache_with_bf16_weights(cache_dtype, implementation):
    """Of the field's failures: cache in fp8, up-projection weights in bf16: cast as the weight wants."""
    lengths, q_lens = (100, 0, 50), (2, 2, 3)
    q, cache, table, w_kv_b, cu = setup(lengths, q_lens, cache_dtype, layers=2)
    arrays = {"layer": np.int32(1)}
    if cache_dtype == "float8_e4m3fn":
        arrays["k_scale"] = np.float32([9.0, 1.3])
    plan = plan_context(lengths, workspace_tokens=64, page_size=PAGE)
    got = compiled(implementation)(q, cache, table, plan, w_kv_b, cu_q_lens=cu, **arrays)
    truth = oracle.context(
        q, cache, table, lengths, w_kv_b, cu_q_lens=cu, scale=SCALE, dtype=ml_dtypes.bfloat16, **arrays
    )
    oracle.assert_attention(got, truth, 1e-2)
    _, lse = compiled(implementation)(q, cache, table, plan, w_kv_b, cu_q_lens=cu, **(arrays | {"layer": np.int32(2)}))
    np.testing.assert_array_equal(np.asarray(lse), -np.inf)


def test_weights_in_another_dtype_than_the_cache(implementation):
    """A bf16 cache under fp32 weights, and the weights as a function."""
    lengths, q_lens = (100, 20), (2, 3)
    q, cache, table, w_kv_b, cu = setup(lengths, q_lens)
    plan = plan_context(lengths, workspace_tokens=64, page_size=PAGE)
    wide = w_kv_b.astype(np.float32)
    truth = oracle.context(q, cache, table, lengths, w_kv_b, cu_q_lens=cu, scale=SCALE)
    got = compiled(implementation)(q, cache, table, plan, wide, cu_q_lens=cu)
    oracle.assert_attention(got, truth, 1e-2)

    def up_project(latent):
        assert latent.dtype == q.dtype
        return jnp.einsum("nl,lhv->nhv", latent.astype(jnp.float32), wide, precision="highest")

    run = jax.jit(
        lambda *arrays: mla_context(
            *arrays, plan, up_project, cu_q_lens=jnp.asarray(cu), scale=SCALE, implementation=implementation
        )
    )
    oracle.assert_attention(run(q, cache, table), truth, 1e-2)


def test_pages_out_of_range_are_masked(implementation):
    """A context token on a page that is not there is left out, not read as a zero key."""
    lengths, q_lens = (100, 50), (2, 3)
    q, cache, table, w_kv_b, cu = setup(lengths, q_lens)
    table = table.copy()
    table[0, 2], table[1, 0] = -1, len(cache)
    plan = plan_context(lengths, workspace_tokens=64, page_size=PAGE)
    got = compiled(implementation)(q, cache, table, plan, w_kv_b, cu_q_lens=cu)
    truth = oracle.context(q, cache, table, lengths, w_kv_b, cu_q_lens=cu, scale=SCALE, dtype=ml_dtypes.bfloat16)
    oracle.assert_attention(got, truth, 1e-2)


def test_context_and_new_tokens_are_the_whole_sequence(implementation):
    """Chunked prefill: context merged with the new tokens' attention to themselves is attention over everything."""
    lengths, q_lens = (40, 0, 17), (5, 6, 1)
    q, cache, table, w_kv_b, cu = setup(lengths, q_lens, "float32", "float32")
    rng = np.random.default_rng(3)
    new = rng.standard_normal((12, 576)).astype(np.float32)
    kv_up = np.einsum("nl,lhv->nhv", new[:, :512], w_kv_b)
    k_new = np.concatenate([kv_up[..., :128], np.repeat(new[:, None, 512:], HEADS, 1)], axis=-1)
    plan = plan_context(lengths, workspace_tokens=32, page_size=PAGE)
    context = compiled(implementation)(q, cache, table, plan, w_kv_b, cu_q_lens=cu)
    attention = implementation if served("mla_prefill", implementation, "float32", "float32") else "xla"
    own = mla_prefill(q, k_new, kv_up, cu, cu, causal=True, scale=SCALE, value_offset=128, implementation=attention)
    got = merge_states(*context, *own, implementation=implementation)

    keys, values, kv_lens = [], [], []
    for b, length in enumerate(lengths):
        rows, _ = oracle.request_rows(oracle.dequantise(cache)[0], table[b], length)
        rows = np.concatenate([rows, new[cu[b] : cu[b + 1]]])
        up = np.einsum("nl,lhv->nhv", rows[:, :512], w_kv_b.astype(np.float64))
        keys.append(np.concatenate([up[..., :128], np.repeat(rows[:, None, 512:], HEADS, 1)], axis=-1))
        values.append(up[..., 128:])
        kv_lens.append(len(rows))
    cu_kv = np.concatenate([[0], np.cumsum(kv_lens)])
    truth = oracle.prefill(q, np.concatenate(keys), np.concatenate(values), cu, cu_kv, causal=True, scale=SCALE)
    oracle.assert_attention(got, truth, 1e-4)


@native_only
@pytest.mark.parametrize(("workspace", "max_chunks"), [(64, 1), (32, 4)])
def test_replays_call_no_handler(workspace, max_chunks, implementation):
    """Steps captured once on a GPU: later ones follow the device's lengths, numbers of chunks and queries."""
    lengths, q_lens, sizes = (40, 0, 17), (2, 1, 3), {"workspace_tokens": workspace, "page_size": PAGE}
    q, cache, table, w_kv_b, cu = setup(lengths, q_lens)
    module = _ffi.MODULES[implementation.partition(":")[0]]

    def step(state):
        plan = plan_context(state["lengths"], **sizes, max_chunks=max_chunks)
        out, lse = mla_context(
            state["q"], cache, table, plan, w_kv_b, cu_q_lens=cu, scale=SCALE, implementation=implementation
        )
        fewer = jnp.maximum(state["lengths"] - 3, 0)
        return {"q": jnp.roll(state["q"], 1, axis=0), "lengths": fewer, "out": out, "lse": lse}

    state = {"q": q, "lengths": np.int32(lengths), "out": np.zeros((*q.shape[:2], 128), q.dtype)}
    state["lse"] = np.zeros(q.shape[:2], np.float32)
    state = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(state)  # XLA's own memory, so that it can be donated
    options = {"xla_gpu_graph_min_graph_size": 1} if on_gpu() else {}
    program = jax.jit(step, donate_argnums=0, compiler_options=options).lower(state).compile()
    made, chunks = [], []
    for _ in range(6):
        q, lengths = np.asarray(state["q"]), np.asarray(state["lengths"])
        chunks.append(int(plan_context(lengths, **sizes).num_chunks))
        truth = oracle.context(q, cache, table, lengths, w_kv_b, cu_q_lens=cu, scale=SCALE, dtype=ml_dtypes.bfloat16)
        before = sum(module.handler_calls().values())
        state = program(state)
        oracle.assert_attention((state["out"], state["lse"]), truth, 1e-2)
        made.append(sum(module.handler_calls().values()) - before)
    assert chunks == [1] * 6 if max_chunks == 1 else set(chunks) == {1, 2}
    each = [2 * n for n in chunks]  # gather, attention
    if on_gpu():  # as in test_graphs.py: the first runs warm up and capture, then temporary memory may move
        assert made[3:] == [0] * 3
    else:
        assert made == each


def test_room_for_more_chunks_changes_nothing(implementation):
    """The same bits from a plan without room to spare, from steps that are left out, and from a loop of as many."""
    lengths = (64, 0, 37)
    q, cache, table, w_kv_b, cu = setup(lengths, (2, 1, 3))
    run, found = compiled(implementation), []
    for max_chunks in (4, 8, 32):
        plan = plan_context(lengths, workspace_tokens=32, page_size=PAGE, max_chunks=max_chunks)
        assert plan.num_chunks == 4
        found.append(run(q, cache, table, plan, w_kv_b, cu_q_lens=cu))
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])


def test_no_context_at_all(implementation):
    q, cache, table, w_kv_b, cu = setup((0, 0), (2, 3))
    plan = plan_context((0, 0), workspace_tokens=64, page_size=PAGE)
    out, lse = compiled(implementation)(q, cache, table, plan, w_kv_b, cu_q_lens=cu)
    assert not np.any(np.asarray(out, np.float32)) and np.all(np.asarray(lse) == -np.inf)
