"""Absorbed attention over a paged latent cache, with one or several query tokens a sequence."""

import jax
import jax.numpy as jnp

from jax_mla.reference.attend import LATENT, attend, einsum, multiply, request_of, result_dtype
from jax_mla.reference.cache import gather_rows, slots

_ROWS_IN_MEMORY = 1 << 19  # dequantised, on a GPU: 1.2 GB in fp32


def split_query(q, compute_dtype) -> tuple[jax.Array, jax.Array]:
    """Latent [..., H, 512] and rope [..., H, 64] of queries that come as one array or as the pair."""
    latent, rope = q if isinstance(q, (tuple, list)) else (q[..., :LATENT], q[..., LATENT:])
    return latent.astype(compute_dtype), rope.astype(compute_dtype)


def attend_rows(
    latent: jax.Array, rope: jax.Array, rows: jax.Array, visible: jax.Array, scale
) -> tuple[jax.Array, jax.Array]:
    """Queries [Q, H, .] against cached rows [N, 576], where `visible` [Q, N]; values are the latent part."""
    values = rows[:, :LATENT]
    scores = einsum("qhl,nl->qhn", latent, values) + einsum("qhr,nr->qhn", rope, rows[:, LATENT:])
    unusable = ~jnp.all(jnp.isfinite(values), axis=-1)
    return attend("qhn,nl->qhl", scores * scale, visible[:, None, :], values, unusable)


def empty_rows(shape: tuple[int, ...], width: int, out_dtype, lse_dtype) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros((*shape, width), out_dtype), jnp.full(shape, -jnp.inf, lse_dtype)


def mla_decode(
    q,
    cache: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    causal: bool = True,
    cu_q_lens: jax.Array | None = None,
    max_q_len: int | None = None,
    layer: jax.Array | int | None = None,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    compute_dtype=jnp.float32,
    out_dtype=None,
) -> tuple[jax.Array, jax.Array]:
    """out [..., H, 512] and natural-log lse [..., H] in `compute_dtype`, for q [B, Q, H, 576] or ragged [T, H, 576]."""
    out_dtype = result_dtype(jax.tree.leaves(q)[0].dtype, out_dtype)
    latent, rope = split_query(q, compute_dtype)
    latent = multiply(latent, q_scale)
    rope = multiply(rope, q_scale)
    batch, max_pages = page_table.shape
    page_size = cache.shape[-2]
    if cu_q_lens is None:
        q_len = latent.shape[1]
        q_lens = jnp.full((batch,), q_len, jnp.int32)
    else:
        q_len = max_q_len
        q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    if latent.size == 0 or batch == 0 or q_len == 0:
        return empty_rows(latent.shape[:-1], LATENT, out_dtype, compute_dtype)

    keys = jnp.arange(max_pages * page_size, dtype=jnp.int32)
    queries = jnp.arange(q_len, dtype=jnp.int32)

    def one_sequence(sequence) -> tuple[jax.Array, jax.Array]:
        latent, rope, page_table, kv_len, q_len = sequence
        kv_len = jnp.maximum(kv_len, 0)
        chosen = slots(page_table[None], keys[None], page_size)[0]
        rows, readable = gather_rows(cache, chosen, layer=layer, k_scale=k_scale, dtype=compute_dtype)
        visible = (readable & (keys < kv_len))[None, :]
        if causal:  # aligned to the bottom right: the last query sees the last key
            visible = visible & (keys <= kv_len - q_len + queries[:, None])
        else:
            visible = jnp.broadcast_to(visible, (queries.size, keys.size))
        return attend_rows(latent, rope, rows, visible, scale)

    def one_by_one(sequences):
        """A row's bits do not depend on its batch, and one sequence's rows are in memory."""
        return jax.lax.map(one_sequence, sequences)

    def many_at_once(sequences):
        """As many as have their rows in _ROWS_IN_MEMORY, since one sequence leaves a GPU idle."""
        return jax.lax.map(one_sequence, sequences, batch_size=max(1, _ROWS_IN_MEMORY // max(keys.size, 1)))

    def attend_sequences(*sequences):
        return jax.lax.platform_dependent(sequences, cuda=many_at_once, rocm=many_at_once, default=one_by_one)

    if cu_q_lens is None:
        out, lse = attend_sequences(latent, rope, page_table, kv_lens, q_lens)
    else:
        tokens = latent.shape[0]
        token = jnp.clip(cu_q_lens[:-1, None] + queries, 0, tokens - 1)
        out, lse = attend_sequences(latent[token], rope[token], page_table, kv_lens, q_lens)
        request, index = request_of(jnp.arange(tokens, dtype=jnp.int32), cu_q_lens)
        owned = (request >= 0) & (index < q_len)
        where = jnp.maximum(request, 0), jnp.clip(index, 0, q_len - 1)
        out = jnp.where(owned[:, None, None], out[where], 0.0)
        lse = jnp.where(owned[:, None], lse[where], -jnp.inf)
    return out.astype(out_dtype), lse
