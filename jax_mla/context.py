"""The chunked-context scan: new tokens attend to a long cached context, one workspace of it at a time.

Each chunk of the context is gathered from the paged cache, up-projected, packed and attended to; the partial results
are merged by their log-sum-exps into an fp32 carry. That start (out 0, lse -inf) makes first touch, continuation and
requests without context the same merge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_mla import _checks, dispatch, reference
from jax_mla.reference import ContextPlan

__all__ = ["ContextPlan", "mla_context", "plan_context"]


def plan_context(context_lens: Any, *, workspace_tokens: int, page_size: int) -> ContextPlan:
    """Cuts the cached context of a batch into chunks of at most workspace_tokens tokens, on the host.

    context_lens [B]: cached tokens of each request, concrete integers. A request is taken whole if it fits in what is
    left of a chunk, else by the largest page-aligned part that fits; it continues in the next chunk. Requests without
    context join no chunk. Returns a ContextPlan with the number of chunks rounded up to a power of two, so that steps
    share compiled programs. Raises ValueError for a workspace smaller than a page, or lengths that are no integers.
    """
    workspace_tokens = _checks.positive("workspace_tokens", workspace_tokens)
    page_size = _checks.positive("page_size", page_size)
    if isinstance(context_lens, jax.core.Tracer):
        raise ValueError("context_lens is traced; expected concrete lengths, since the plan is made on the host")
    lengths = np.asarray(context_lens)
    if lengths.ndim != 1 or (lengths.size and lengths.dtype.kind not in "iu"):
        raise ValueError(f"context_lens is {lengths.dtype.name}{list(lengths.shape)}; expected integers of shape [B]")
    return reference.plan_context(lengths, workspace_tokens=workspace_tokens, page_size=page_size)


def mla_context(
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    plan: ContextPlan,
    w_kv_b: jax.Array | Callable[[jax.Array], jax.Array],
    *,
    cu_q_lens: jax.Array,
    scale: float,
    layer: int | jax.Array | None = None,
    k_scale: jax.Array | float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of new tokens to the cached context of their requests, without a causal mask.

    q [T, H, 192] in bf16, fp16 or fp32; cache, layer, k_scale as for `mla_decode`; page_table [B, max_pages] int32;
    plan: from `plan_context`. w_kv_b [512, H, 256]: the up-projection of a latent to 128 nope columns and 128 of
    value; or a function from latents [W, 512] in q's dtype to [W, H, 256]. The latent is cast to the weights' dtype,
    whatever the cache holds. cu_q_lens [B + 1] int32. scale: static (192 ** -0.5).

    Returns out [T, H, 128] in q's dtype and lse [T, H] fp32, natural: merge them with the attention of the new tokens
    to themselves. A request without context has out 0 and lse -inf. Raises ValueError or NotImplementedError while
    tracing, as `mla_decode`.
    """
    q = _checks.array("q", q)
    _checks.dtype("q", q, _checks.FLOATS)
    _checks.shape("q", q, ("T", "H", _checks.HEAD_DIM))
    num_heads = q.shape[1]
    _checks.num_heads("q", num_heads)
    cache, layer = _checks.cache(cache, layer)
    k_scale = _checks.k_scale(k_scale, cache)
    page_table = _checks.int32("page_table", page_table, ("B", "max_pages"))
    batch = page_table.shape[0]
    cu_q_lens = _checks.int32("cu_q_lens", cu_q_lens, (batch + 1,))
    if not isinstance(plan, ContextPlan):
        raise ValueError(f"plan is a {type(plan).__name__}; expected what plan_context returned")
    if plan.starts.shape[-1] != batch or plan.page_size != cache.shape[-2]:
        raise ValueError(
            f"plan was made for {plan.starts.shape[-1]} requests and pages of {plan.page_size} tokens; "
            f"page_table has {batch} and cache {cache.shape[-2]}"
        )
    if not callable(w_kv_b):
        w_kv_b = _checks.array("w_kv_b", w_kv_b)
        _checks.dtype("w_kv_b", w_kv_b, _checks.FLOATS)
        _checks.shape("w_kv_b", w_kv_b, (_checks.LATENT, num_heads, 2 * _checks.NOPE))
    dispatch.select(
        "mla_context",
        implementation=implementation,
        q_dtype=q.dtype.name,
        cache_dtype=_checks.cache_dtype_name(cache),
        num_heads=num_heads,
    )
    # A function cannot be an argument of jit; its caller jits around the whole call.
    scan = reference.mla_context if callable(w_kv_b) else _scan
    return scan(
        q,
        cache,
        page_table,
        plan,
        w_kv_b,
        cu_q_lens=cu_q_lens,
        scale=_checks.number("scale", scale),
        layer=layer,
        k_scale=k_scale,
    )


_scan = jax.jit(reference.mla_context, static_argnames=("scale", "compute_dtype", "out_dtype"))
