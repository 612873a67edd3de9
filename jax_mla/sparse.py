"""Absorbed attention to chosen slots of a paged latent cache.

Method: DeepSeek Sparse Attention, DeepSeek-V3.2 (an indexer, not here, chooses the top-k tokens of each query).
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from jax_mla import _checks, _ffi, dispatch, reference
from jax_mla.dispatch import Choice


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static in one call of mla_sparse_decode."""

    scale: float
    choices: tuple[Choice, ...]
    named: bool


def _native(call: _Call, choice: Choice, q, q_rope, cache, indices, topk_lens, sink, layer, q_scale, k_scale):
    heads = choice.heads
    tuning = dispatch.SPLIT_TUNING[choice.platform]
    out, lse = _ffi.sparse_decode(
        heads.pad(q),
        None if q_rope is None else heads.pad(q_rope),
        cache if cache.ndim == 4 else cache[None],
        layer,
        indices,
        topk_lens,
        None if sink is None else heads.pad(sink[None, :, None]).reshape(-1),
        q_scale,
        k_scale,
        heads=heads,
        splits=heads.index_splits(*indices.shape, **dataclasses.asdict(tuning)),
        scale=call.scale,
        variant=choice.variant,
        out_dtype=q.dtype if q.dtype.name in _checks.FLOATS else jnp.bfloat16,
    )
    return heads.unpad(out), heads.unpad(lse)


def _xla(call: _Call, q, q_rope, cache, indices, topk_lens, sink, layer, q_scale, k_scale):
    return reference.mla_sparse_decode(
        q if q_rope is None else (q, q_rope), cache, indices, scale=call.scale, topk_lens=topk_lens, sink=sink,
        layer=layer, q_scale=q_scale, k_scale=k_scale,
    )  # fmt: skip


# Names of what _core takes, for its batching rule.
_OPERANDS = ("q", "q_rope", "cache", "indices", "topk_lens", "sink", "layer", "q_scale", "k_scale")
_OF_A_TOKEN = ("q", "q_rope", "indices", "topk_lens")


def _core(call: _Call, *operands):
    """mla_sparse_decode on flat queries [T, H, width], with its rules for vmap and for differentiation."""
    native, xla, fold = (functools.partial(rule, call) for rule in (_native, _xla, _fold))
    return dispatch.run_decode("mla_sparse_decode", call.choices, call.named, native, xla, fold, *operands)


def _fold(call: _Call, size: int, in_batched, operands):
    """vmap over queries and what is theirs: the new axis becomes more query tokens."""
    named = dict(zip(_OPERANDS, operands, strict=True))
    for name, flag in zip(_OPERANDS, in_batched, strict=True):
        is_batched = any(jax.tree.leaves(flag))
        if is_batched and name not in _OF_A_TOKEN:
            raise NotImplementedError(
                f"vmap of mla_sparse_decode over {name}: it maps queries, indices and topk_lens. Fold the axis into "
                "the pages of one cache instead"
            )
        if name in _OF_A_TOKEN and named[name] is not None:
            x = dispatch.spread(named[name], size, is_batched)
            named[name] = x.reshape(size * x.shape[1], *x.shape[2:])
    out, lse = _core(call, *named.values())
    return out.reshape(size, -1, *out.shape[1:]), lse.reshape(size, -1, *lse.shape[1:])


_sparse_decode = jax.jit(_core, static_argnums=0)


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
    has out 0 and lse -inf. Raises ValueError or NotImplementedError while tracing, as `mla_decode`; also when
    differentiated, and for vmap over anything but q, indices and topk_lens.
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
    scale = _checks.number("scale", scale)
    if 0 in first.shape or cache.size == 0 or indices.size == 0:
        # No query or no key: every row is empty, and no kernel is handed a buffer without memory.
        dtype = first.dtype if first.dtype.name in _checks.FLOATS else jnp.bfloat16
        return jnp.zeros((*lead, num_heads, _checks.LATENT), dtype), jnp.full((*lead, num_heads), -jnp.inf, jnp.float32)
    choices = dispatch.select(
        "mla_sparse_decode",
        implementation=implementation,
        q_dtype=first.dtype.name,
        cache_dtype=_checks.cache_dtype_name(cache),
        num_heads=num_heads,
    )
    tokens = math.prod(lead)
    call = _Call(scale, choices, implementation is not None)
    out, lse = _sparse_decode(
        call,
        first.reshape(tokens, *first.shape[-2:]),
        None if rope is None else rope.reshape(tokens, *rope.shape[-2:]),
        cache,
        indices.reshape(tokens, -1),
        None if topk_lens is None else topk_lens.reshape(tokens),
        sink,
        layer,
        q_scale,
        k_scale,
    )
    return out.reshape(*lead, num_heads, _checks.LATENT), lse.reshape(*lead, num_heads)
