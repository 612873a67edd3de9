"""Absorbed attention to chosen slots of the cache."""

import math

import jax
import jax.numpy as jnp

from jax_mla.reference.attend import LATENT, ROPE, multiply, result_dtype
from jax_mla.reference.cache import gather_rows
from jax_mla.reference.decode import attend_rows, empty_rows, split_query
from jax_mla.reference.merge import apply_sink

# Query tokens whose chosen rows, [tokens, K, 576], are in memory at once.
_TOKEN_BLOCK = 32


def mla_sparse_decode(
    q,
    cache: jax.Array,
    indices: jax.Array,
    *,
    scale: float,
    topk_lens: jax.Array | None = None,
    sink: jax.Array | None = None,
    layer: jax.Array | int | None = None,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    compute_dtype=jnp.float32,
    out_dtype=None,
) -> tuple[jax.Array, jax.Array]:
    """out [..., H, 512] and lse [..., H] of q [..., H, 576] over the slots `indices` [..., K]; -1 is no token.

    A slot that stands twice counts twice. Only the first `topk_lens` [...] of the K count where that is given.
    """
    out_dtype = result_dtype(jax.tree.leaves(q)[0].dtype, out_dtype)
    latent, rope = split_query(q, compute_dtype)
    *leading, heads, _ = latent.shape
    if latent.size == 0:
        return empty_rows((*leading, heads), LATENT, out_dtype, compute_dtype)
    tokens, topk = math.prod(leading), indices.shape[-1]
    if topk_lens is None:
        topk_lens = jnp.full(leading, topk, jnp.int32)

    def one_token(token) -> tuple[jax.Array, jax.Array]:
        latent, rope, indices, topk_len = token
        rows, readable = gather_rows(cache, indices, layer=layer, k_scale=k_scale, dtype=compute_dtype)
        visible = readable & (jnp.arange(topk, dtype=jnp.int32) < topk_len)
        return attend_rows(latent[None], rope[None], rows, visible[None], scale)

    operands = (
        multiply(latent, q_scale).reshape(tokens, heads, LATENT),
        multiply(rope, q_scale).reshape(tokens, heads, ROPE),
        indices.reshape(tokens, topk),
        topk_lens.reshape(tokens),
    )
    out, lse = jax.lax.map(one_token, operands, batch_size=_TOKEN_BLOCK)
    out, lse = out.reshape(*leading, heads, LATENT), lse.reshape(*leading, heads)
    if sink is not None:
        out = apply_sink(out, lse, sink)
    return out.astype(out_dtype), lse
