"""Absorbed attention to chosen slots of a paged latent cache.

Method: DeepSeek Sparse Attention, DeepSeek-V3.2 (an indexer, not here, chooses the top-k tokens of each query).
"""

from __future__ import annotations

import functools

import jax

from jax_mla import _checks, dispatch, reference


def mla_sparse_decode(
    q: jax.Array | tuple[jax.Array, jax.Array],
    cache: jax.Array,
    indices: jax.Array,
    *,
    scale: float,
    topk_lens: jax.Array | None = None,
    sink: jax.Array | None = None,
    layer: int | jax.Array | None = None,
    q_scale: jax.Array | float | None = None,
    k_scale: jax.Array | float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of each query token to the slots that its row of `indices` names.

    q [.., H, 576], or the pair (latent [.., H, 512], rope [.., H, 64]); cache, layer, q_scale, k_scale, scale and
    dtypes as for `mla_decode`. indices [.., K] int32 slots (page * P + offset), any K: -1, and any slot out of range,
    is no token; a slot that stands twice counts twice. topk_lens [..] int32: only that many of each row count. sink
    [H] fp32: a natural-log logit that joins the denominator and leaves lse alone.

    Returns out [.., H, 512] in q's dtype (bf16 for fp8 queries) and lse [.., H] fp32, natural. A row without tokens
    has out 0 and lse -inf. Raises ValueError or NotImplementedError while tracing, as `mla_decode`.
    """
    cache, layer = _checks.cache(cache, layer)
    first, rope = _checks.queries(q, None)
    *lead, num_heads, _ = first.shape
    _checks.q_and_cache_dtypes(first, cache, q_scale)
    indices = _checks.int32("indices", indices, (*lead, "K"))
    if topk_lens is not None:
        topk_lens = _checks.int32("topk_lens", topk_lens, lead)
    if sink is not None:
        sink = _checks.array("sink", sink)
        _checks.dtype("sink", sink, ("float32",))
        _checks.shape("sink", sink, (num_heads,))
    q_scale, k_scale = _checks.fp32_scalar("q_scale", q_scale), _checks.k_scale(k_scale, cache)
    dispatch.select(
        "mla_sparse_decode",
        implementation=implementation,
        q_dtype=first.dtype.name,
        cache_dtype=_checks.cache_dtype_name(cache),
        num_heads=num_heads,
    )
    pair = first if rope is None else (first, rope)
    scale = _checks.number("scale", scale)
    return _attend(pair, cache, indices, topk_lens, sink, layer, q_scale, k_scale, scale=scale)


@functools.partial(jax.jit, static_argnames=("scale",))
def _attend(q, cache, indices, topk_lens, sink, layer, q_scale, k_scale, *, scale: float):
    return reference.mla_sparse_decode(
        q, cache, indices, scale=scale, topk_lens=topk_lens, sink=sink, layer=layer, q_scale=q_scale, k_scale=k_scale
    )
