"""Attention of up-projected queries, keys and values over a ragged batch."""

import jax
import jax.numpy as jnp

from jax_mla.reference.attend import NOPE, ROPE, attend, einsum, multiply, request_of, result_dtype
from jax_mla.reference.decode import empty_rows
from jax_mla.reference.merge import merge_states

# Queries whose scores, [queries, H, S], are in memory at once.
_QUERY_BLOCK = 256


def attend_ragged(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    query_request: jax.Array,
    query_limit: jax.Array,
    key_request: jax.Array,
    key_index: jax.Array,
    scale,
    compute_dtype,
) -> tuple[jax.Array, jax.Array]:
    """out [T, H, 128] and lse [T, H] of q [T, H, 192] over k [S, H, 192] and v [S, H, 128].

    A query sees the keys of its own request whose `key_index` [S] is at most its `query_limit` [T]. Request -1 marks
    queries that see nothing and keys that nobody sees.
    """
    tokens, heads, _ = q.shape
    if q.size == 0 or k.size == 0:
        return empty_rows((tokens, heads), NOPE, compute_dtype, compute_dtype)
    k, v = k.astype(compute_dtype), v.astype(compute_dtype)
    unusable = ~jnp.all(jnp.isfinite(v), axis=-1).T

    def one_query(query: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        q, request, limit = query
        visible = (key_request == request) & (key_request >= 0) & (key_index <= limit)
        scores = einsum("hd,shd->hs", q.astype(compute_dtype), k) * scale
        return attend("hs,shd->hd", scores, visible[None, :], v, unusable)

    return jax.lax.map(one_query, (q, query_request, query_limit), batch_size=_QUERY_BLOCK)


def whole_keys(nope: jax.Array, k_pe: jax.Array) -> jax.Array:
    """[S, H, 192] of nope parts [S, H, 128] or an up-projection [S, H, 256], and k_pe [S, 64] or latent rows [S, 576].

    As `pack_kv`'s keys, and with a derivative.
    """
    rope = jnp.broadcast_to(k_pe[:, None, -ROPE:], (*nope.shape[:2], ROPE))
    return jnp.concatenate([nope[..., :NOPE], rope], axis=-1)


def mla_prefill(
    q: jax.Array,
    k: jax.Array | tuple[jax.Array, jax.Array],
    v: jax.Array,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array,
    *,
    causal: bool,
    scale: float,
    value_offset: int = 0,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    carry: tuple[jax.Array, jax.Array] | None = None,
    compute_dtype=jnp.float32,
    out_dtype=None,
) -> tuple[jax.Array, jax.Array]:
    """out [T, H, 128] and lse [T, H]; with a `carry` (out, lse) both come merged into it, in its dtype."""
    if isinstance(k, tuple):
        k = whole_keys(*k)
    tokens, stored = q.shape[0], k.shape[0]
    query_request, query_index = request_of(jnp.arange(tokens, dtype=jnp.int32), cu_q_lens)
    key_request, key_index = request_of(jnp.arange(stored, dtype=jnp.int32), cu_kv_lens)
    if causal and cu_q_lens.shape[0] > 1:  # aligned to the bottom right: the last query sees the last key
        beyond = (cu_kv_lens[1:] - cu_kv_lens[:-1]) - (cu_q_lens[1:] - cu_q_lens[:-1])
        query_limit = beyond[jnp.maximum(query_request, 0)] + query_index
    else:
        query_limit = jnp.full((tokens,), stored, jnp.int32)
    scale = multiply(multiply(jnp.asarray(scale, compute_dtype), q_scale), k_scale)
    out, lse = attend_ragged(
        q,
        k,
        v[..., value_offset : value_offset + NOPE],
        query_request=query_request,
        query_limit=query_limit,
        key_request=key_request,
        key_index=key_index,
        scale=scale,
        compute_dtype=compute_dtype,
    )
    out = multiply(out, v_scale)
    if carry is not None:
        return merge_states(*carry, out, lse, compute_dtype=compute_dtype, out_dtype=out_dtype)
    return out.astype(result_dtype(q.dtype, out_dtype)), lse
