"""Attention of new tokens to cached context, chunk by chunk: gather, up-project, attend, merge."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_mla.reference.attend import LATENT, NOPE, einsum, request_of, result_dtype, varying_like
from jax_mla.reference.cache import gather_rows, slots
from jax_mla.reference.decode import empty_rows
from jax_mla.reference.merge import merge_states
from jax_mla.reference.pack import pack_kv
from jax_mla.reference.prefill import attend_ragged


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContextPlan:
    """The cached context of B requests, cut into chunks of at most `workspace_tokens` tokens.

    `chunks` is the number made, rounded up to a power of two, so that steps share compiled programs; the chunks that
    round it up are empty.
    """

    starts: jax.Array  # [chunks, B] int32: first token of the request's piece in the chunk, in tokens of its context
    cu_kv_lens: jax.Array  # [chunks, B + 1] int32: the pieces in the workspace; an empty one has no context there
    workspace_tokens: int = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})


def plan_context(context_lens, *, workspace_tokens: int, page_size: int) -> ContextPlan:
    """Cuts contexts of `context_lens` [B] tokens, on the host.

    Requests go in order. One is taken whole if it fits in what is left of the chunk; else as many whole pages of it as
    fit, if that is at least one, and the chunk is closed. Lengths below 0 count as 0.
    """
    if workspace_tokens < page_size:
        raise ValueError(f"workspace_tokens is {workspace_tokens}; it must hold a page of {page_size} tokens")
    lengths = [max(length, 0) for length in jnp.asarray(context_lens).tolist()]
    chunks: list[dict[int, tuple[int, int]]] = [{}]  # request -> (start, length)
    room = workspace_tokens
    for request, length in enumerate(lengths):
        start = 0
        while start < length:
            left = length - start
            piece = left if left <= room else room // page_size * page_size
            if piece > 0:
                chunks[-1][request] = (start, piece)
                start += piece
                room -= piece
            if piece < left:
                chunks.append({})
                room = workspace_tokens
    chunks += [{}] * ((1 << (len(chunks) - 1).bit_length()) - len(chunks))
    starts, cu_kv_lens = [], []
    for chunk in chunks:
        pieces = [chunk.get(request, (0, 0)) for request in range(len(lengths))]
        starts.append([start for start, _ in pieces])
        offsets = [0]
        for _, piece in pieces:
            offsets.append(offsets[-1] + piece)
        cu_kv_lens.append(offsets)
    return ContextPlan(
        jnp.asarray(starts, jnp.int32).reshape(len(chunks), len(lengths)),
        jnp.asarray(cu_kv_lens, jnp.int32),
        workspace_tokens,
        page_size,
    )


def mla_context(
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    plan: ContextPlan,
    w_kv_b: jax.Array | Callable[[jax.Array], jax.Array],
    *,
    cu_q_lens: jax.Array,
    scale: float,
    layer: jax.Array | int | None = None,
    k_scale: jax.Array | None = None,
    compute_dtype=jnp.float32,
    out_dtype=None,
) -> tuple[jax.Array, jax.Array]:
    """out [T, H, 128] and lse [T, H] of q [T, H, 192] over all the context that `plan` covers, without a causal mask.

    `w_kv_b` is [512, H, 256] or a function from latents [W, 512], in q's dtype, to [W, H, 256]. The latent is cast to
    the weight's dtype, and so is the up-projection, which is accumulated in `compute_dtype`; nothing is rounded on the
    way when that is float64.
    """
    tokens, heads, _ = q.shape
    out_dtype = result_dtype(q.dtype, out_dtype)
    exact = compute_dtype == jnp.float64
    query_request, _ = request_of(jnp.arange(tokens, dtype=jnp.int32), cu_q_lens)
    query_limit = jnp.full((tokens,), plan.workspace_tokens, jnp.int32)
    workspace = jnp.arange(plan.workspace_tokens, dtype=jnp.int32)
    latent_dtype = result_dtype(q.dtype) if callable(w_kv_b) else w_kv_b.dtype
    if exact:
        latent_dtype = jnp.dtype(compute_dtype)

    def up_project(latent: jax.Array) -> jax.Array:
        if callable(w_kv_b):
            return w_kv_b(latent)
        product = einsum("nl,lhv->nhv", latent.astype(compute_dtype), w_kv_b.astype(compute_dtype))
        return product.astype(latent_dtype)

    def attend_chunk(starts: jax.Array, cu_kv_lens: jax.Array) -> tuple[jax.Array, jax.Array]:
        request, index = request_of(workspace, cu_kv_lens)
        position = starts[jnp.maximum(request, 0)] + index
        chosen = slots(page_table, position, plan.page_size, request=request)
        rows, readable = gather_rows(cache, chosen, layer=layer, k_scale=k_scale, dtype=latent_dtype)
        rows = jnp.where(readable[:, None], rows, jnp.zeros((), rows.dtype))
        kv_up = up_project(rows[:, :LATENT])
        return attend_ragged(
            q,
            pack_kv(kv_up, rows),
            kv_up[..., NOPE:],
            query_request=query_request,
            query_limit=query_limit,
            key_request=jnp.where(readable, request, -1),
            key_index=index,
            scale=scale,
            compute_dtype=compute_dtype,
        )

    def step(carry, chunk):
        starts, cu_kv_lens = chunk

        def merge(carry):
            return merge_states(*carry, *attend_chunk(starts, cu_kv_lens), compute_dtype=compute_dtype)

        return jax.lax.cond(cu_kv_lens[-1] > 0, merge, lambda carry: carry, carry), None

    carry = empty_rows((tokens, heads), NOPE, compute_dtype, compute_dtype)
    carry = varying_like(carry, q, cache, page_table, plan, w_kv_b, cu_q_lens, layer, k_scale)
    if tokens and page_table.shape[0]:
        carry, _ = jax.lax.scan(step, carry, (plan.starts, plan.cu_kv_lens))
    out, lse = carry
    return out.astype(out_dtype), lse
