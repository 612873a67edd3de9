"""Attention of new tokens to cached context, chunk by chunk: gather, up-project, pack, attend, merge."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_mla.reference.attend import LATENT, NOPE, einsum, request_of, result_dtype, varying_like
from jax_mla.reference.cache import gather_rows, slots
from jax_mla.reference.decode import empty_rows
from jax_mla.reference.merge import merge_states
from jax_mla.reference.plan_context import ContextPlan
from jax_mla.reference.prefill import attend_ragged, whole_keys

UpProjection = jax.Array | Callable[[jax.Array], jax.Array]  # [512, H, 256], or latents [W, 512] -> [W, H, 256]


def latent_dtype(q: jax.Array, w_kv_b: UpProjection) -> jnp.dtype:
    """What the gathered latents are cast to: what the weights consume."""
    return result_dtype(q.dtype) if callable(w_kv_b) else w_kv_b.dtype


# Rows that XLA's CPU multiplies at once. It is twice as fast on these as on thousands, and what it converts on the way
# (older ones go through fp32) stays small.
_CPU_ROWS = 128


def up_project(latent: jax.Array, w_kv_b: UpProjection) -> jax.Array:
    """[W, 512] -> [W, H, 256], keys then values, in the weights' dtype; XLA sums 16-bit products in fp32."""
    if callable(w_kv_b):
        return w_kv_b(latent)

    def whole(latent: jax.Array, weights: jax.Array) -> jax.Array:
        return einsum("nl,lhv->nhv", latent, weights)

    def by_blocks(latent: jax.Array, weights: jax.Array) -> jax.Array:
        blocks = jax.lax.map(lambda block: whole(block, weights), latent.reshape(-1, _CPU_ROWS, LATENT))
        return blocks.reshape(-1, *blocks.shape[2:])

    if latent.shape[0] % _CPU_ROWS:
        return whole(latent, w_kv_b)
    return jax.lax.platform_dependent(latent, w_kv_b, cpu=by_blocks, default=whole)


def gather_context(
    cache: jax.Array,
    page_table: jax.Array,
    starts: jax.Array,
    cu_kv_lens: jax.Array,
    *,
    workspace_tokens: int,
    dtype,
    layer: jax.Array | int | None = None,
    k_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One chunk of a plan: dequantised rows [W, 576] in `dtype`, zero where there is none, and of each row its request
    (-1 where none can be read) and its index in the request's piece.
    """
    request, index = request_of(jnp.arange(workspace_tokens, dtype=jnp.int32), cu_kv_lens)
    position = starts[jnp.maximum(request, 0)] + index
    chosen = slots(page_table, position, cache.shape[-2], request=request)
    rows, readable = gather_rows(cache, chosen, layer=layer, k_scale=k_scale, dtype=dtype)
    return jnp.where(readable[:, None], rows, jnp.zeros((), rows.dtype)), jnp.where(readable, request, -1), index


def readable_context(
    page_table: jax.Array,
    starts: jax.Array,
    cu_kv_lens: jax.Array,
    *,
    pages: int,
    page_size: int,
    workspace_tokens: int,
    readable_layer: jax.Array | bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """page_table, starts and cu_kv_lens of the same context without what cannot be read.

    Attention without a causal mask does not ask where a key stands. So each row of the table is moved together over
    the pages that are not there, and a chunk's pieces are cut shorter by their tokens: no mask is left to apply.
    """
    batch, max_pages = page_table.shape
    readable = (page_table >= 0) & (page_table < pages) & readable_layer
    before = jnp.pad(jnp.cumsum(readable, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))  # readable pages before each
    place = jnp.where(readable, before[:, :-1], max_pages)
    requests = jnp.arange(batch, dtype=jnp.int32)
    table = jnp.full_like(page_table, -1).at[requests[:, None], place].set(page_table, mode="drop")
    is_whole = jnp.pad(readable, ((0, 0), (0, 1)))

    def moved(token: jax.Array) -> jax.Array:  # [max_chunks, B]: readable tokens before it
        page, offset = token // page_size, token % page_size
        inside = jnp.clip(page, 0, max_pages)
        tokens = before[requests, inside] * page_size + jnp.where(is_whole[requests, inside], offset, 0)
        return jnp.where(page < 0, 0, tokens)

    lengths = jnp.maximum(cu_kv_lens[:, 1:] - cu_kv_lens[:, :-1], 0)
    new_starts = moved(starts)
    new_lengths = jnp.maximum(moved(starts + lengths) - new_starts, 0)
    ends = jnp.minimum(jnp.cumsum(new_lengths, axis=1, dtype=jnp.int32), workspace_tokens)
    return table, new_starts, jnp.pad(ends, ((0, 0), (1, 0)))


def mla_context(
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    plan: ContextPlan,
    w_kv_b: UpProjection,
    *,
    cu_q_lens: jax.Array,
    scale: float,
    layer: jax.Array | int | None = None,
    k_scale: jax.Array | None = None,
    carry: tuple[jax.Array, jax.Array] | None = None,
    compute_dtype=jnp.float32,
    out_dtype=None,
) -> tuple[jax.Array, jax.Array]:
    """out [T, H, 128] and lse [T, H] of q [T, H, 192] over all the context that `plan` covers, without a causal mask.

    The latent is cast to the weights' dtype, keys and values to that of q. With a `carry` (out, lse) both come merged
    into it, in its dtype. Nothing is rounded on the way where `compute_dtype` is float64.
    """
    tokens, heads, _ = q.shape
    exact = compute_dtype == jnp.float64
    query_request, _ = request_of(jnp.arange(tokens, dtype=jnp.int32), cu_q_lens)
    query_limit = jnp.full((tokens,), plan.workspace_tokens, jnp.int32)
    key_dtype = compute_dtype if exact else q.dtype
    if exact and not callable(w_kv_b):
        w_kv_b = w_kv_b.astype(compute_dtype)

    def attend_chunk(starts: jax.Array, cu_kv_lens: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, request, index = gather_context(
            cache,
            page_table,
            starts,
            cu_kv_lens,
            workspace_tokens=plan.workspace_tokens,
            dtype=compute_dtype if exact else latent_dtype(q, w_kv_b),
            layer=layer,
            k_scale=k_scale,
        )
        kv_up = up_project(rows[:, :LATENT], w_kv_b)
        return attend_ragged(
            q,
            whole_keys(kv_up, rows.astype(kv_up.dtype)).astype(key_dtype),
            kv_up[..., NOPE:].astype(key_dtype),
            query_request=query_request,
            query_limit=query_limit,
            key_request=request,
            key_index=index,
            scale=scale,
            compute_dtype=compute_dtype,
        )

    def step(state, chunk):
        starts, cu_kv_lens = chunk

        def merge(state):
            return merge_states(*state, *attend_chunk(starts, cu_kv_lens), compute_dtype=compute_dtype)

        return jax.lax.cond(cu_kv_lens[-1] > 0, merge, lambda state: state, state), None

    state = empty_rows((tokens, heads), NOPE, compute_dtype, compute_dtype) if carry is None else carry
    state = varying_like(state, q, cache, page_table, plan, w_kv_b, cu_q_lens, layer, k_scale, carry)
    if tokens and page_table.shape[0]:
        state, _ = jax.lax.scan(step, state, (plan.starts, plan.cu_kv_lens))
    out, lse = state
    return out.astype(out_dtype or (out.dtype if carry is not None else result_dtype(q.dtype))), lse
