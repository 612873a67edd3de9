"""plan_context and mla_context: attention to a long cached context, chunk by chunk."""

from functools import partial

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest

from jax_mla import merge_states, mla_context, mla_prefill, plan_context

OPERATION = "mla_context"
SCALE = 192**-0.5
HEADS, PAGE = 4, 16


def pieces(plan):
    """Of each chunk that is not empty, the (request, first token, length) of its pieces."""
    starts, lengths = np.asarray(plan.starts), np.diff(np.asarray(plan.cu_kv_lens), axis=1)
    chunks = [[(b, int(s[b]), int(n[b])) for b in np.flatnonzero(n)] for s, n in zip(starts, lengths, strict=True)]
    return [chunk for chunk in chunks if chunk]


def compiled(implementation):
    return jax.jit(partial(mla_context, scale=SCALE, implementation=implementation))


def setup(lengths, q_lens, cache_dtype="bfloat16", dtype="bfloat16", layers=None):
    rng = np.random.default_rng(0)
    cache, table = cases.make_cache(rng, lengths, page_size=PAGE, cache_dtype=cache_dtype, layers=layers)
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


def test_workspace_holds_a_page():
    with pytest.raises(ValueError, match="workspace_tokens is 15"):
        plan_context([3], workspace_tokens=15, page_size=16)


@pytest.mark.parametrize("workspace", [16, 48, 128, 1024])
def test_chunks_add_up_to_the_whole(workspace, implementation):
    """Any workspace gives attention over the whole context; requests without context are empty rows."""
    lengths, q_lens = (200, 48, 0, 33, 1), (3, 1, 2, 0, 4)
    q, cache, table, w_kv_b, cu = setup(lengths, q_lens)
    plan = plan_context(lengths, workspace_tokens=workspace, page_size=PAGE)
    got = compiled(implementation)(q, cache, table, plan, w_kv_b, cu_q_lens=cu)
    assert got[0].dtype == "bfloat16" and got[1].dtype == "float32"
    truth = oracle.context(q, cache, table, lengths, w_kv_b, cu_q_lens=cu, scale=SCALE, dtype=ml_dtypes.bfloat16)
    oracle.assert_attention(got, truth, 1e-2)


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
    own = mla_prefill(
        q, k_new, kv_up, cu, cu, causal=True, scale=SCALE, value_offset=128, implementation=implementation
    )
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


def test_no_context_at_all(implementation):
    q, cache, table, w_kv_b, cu = setup((0, 0), (2, 3))
    plan = plan_context((0, 0), workspace_tokens=64, page_size=PAGE)
    out, lse = compiled(implementation)(q, cache, table, plan, w_kv_b, cu_q_lens=cu)
    assert not np.any(np.asarray(out, np.float32)) and np.all(np.asarray(lse) == -np.inf)
