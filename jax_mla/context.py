"""The chunked-context scan: new tokens attend to a long cached context, one workspace of it at a time.

Each chunk of the context is gathered from the paged cache, up-projected and attended to in place; the partial results
are merged by their log-sum-exps into an fp32 carry. That start (out 0, lse -inf) makes first touch, continuation and
requests without context the same merge.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla import _checks, _ffi, dispatch, reference
from jax_mla.dispatch import Choice
from jax_mla.prefill import mla_prefill
from jax_mla.reference import ContextPlan

__all__ = ["ContextPlan", "gather_context", "mla_context", "plan_context"]


def plan_context(
    context_lens: Any, *, workspace_tokens: int, page_size: int, max_chunks: int | None = None
) -> ContextPlan:
    """Cuts the cached context of a batch into chunks of at most workspace_tokens tokens.

    context_lens [B]: cached tokens of each request, integers; below 0 counts as 0. A request is taken whole if it fits
    in what is left of a chunk, else by the largest page-aligned part that fits; it continues in the next chunk.
    Requests without context join no chunk.

    max_chunks: static, the chunks that the plan's arrays have room for. None: the number made, rounded up to a power
    of two, so that steps share compiled programs; that needs concrete lengths, and the plan is made on the host. Traced
    lengths are planned on the device, and need it: N tokens of context in all, of whatever lengths, take no more than
    N // (workspace_tokens - page_size + 1) + 1 chunks. Context beyond the last chunk is not attended to; the plan's
    num_chunks is then above max_chunks, and `validate` reports it.

    Returns a ContextPlan. Raises ValueError for a workspace smaller than a page, for lengths that are no integers, for
    traced lengths without max_chunks, and for concrete ones that it has no room for.
    """
    workspace_tokens = _checks.positive("workspace_tokens", workspace_tokens)
    page_size = _checks.positive("page_size", page_size)
    if workspace_tokens < page_size:
        raise ValueError(f"workspace_tokens is {workspace_tokens}; it must hold a page of {page_size} tokens")
    sizes = {"workspace_tokens": workspace_tokens, "page_size": page_size}
    if max_chunks is not None:
        max_chunks = _checks.positive("max_chunks", max_chunks)
    if isinstance(context_lens, jax.core.Tracer):
        if max_chunks is None:
            raise ValueError("context_lens is traced; expected max_chunks beside it, a static bound of the chunks")
        context_lens = _checks.int32("context_lens", context_lens, ("B",))
        return reference.plan_context_traced(context_lens, **sizes, max_chunks=max_chunks)
    lengths = np.asarray(context_lens)
    if lengths.ndim != 1 or (lengths.size and lengths.dtype.kind not in "iu"):
        raise ValueError(f"context_lens is {lengths.dtype.name}{list(lengths.shape)}; expected integers of shape [B]")
    plan = reference.plan_context(lengths, **sizes, max_chunks=max_chunks)
    if plan.num_chunks > plan.max_chunks:
        raise ValueError(f"max_chunks is {max_chunks}; context_lens take {plan.num_chunks} chunks")
    return plan


@dataclasses.dataclass(frozen=True)
class _Gather:
    """What is static in one gather."""

    workspace_tokens: int
    dtype: str
    choices: tuple[Choice, ...]
    named: bool


def _gather_native(call: _Gather, choice: Choice, cache, layer, k_scale, page_table, starts, cu_kv_lens):
    del choice
    stacked = cache if cache.ndim == 4 else cache[None]
    return _ffi.gather_context(
        stacked, layer, k_scale, page_table, starts, cu_kv_lens, workspace_tokens=call.workspace_tokens,
        dtype=jnp.dtype(call.dtype),
    )  # fmt: skip


def _gather_xla(call: _Gather, cache, layer, k_scale, page_table, starts, cu_kv_lens):
    rows, _, _ = reference.gather_context(
        cache, page_table, starts, cu_kv_lens, workspace_tokens=call.workspace_tokens, dtype=jnp.dtype(call.dtype),
        layer=layer, k_scale=k_scale,
    )  # fmt: skip
    return rows[:, : _checks.LATENT], rows[:, _checks.LATENT :]


@functools.partial(jax.jit, static_argnames=("call",))
def _gather(cache, layer, k_scale, page_table, starts, cu_kv_lens, *, call: _Gather):
    native, xla = functools.partial(_gather_native, call), functools.partial(_gather_xla, call)
    operands = (cache, layer, k_scale, page_table, starts, cu_kv_lens)
    return dispatch.run(call.choices, call.named, native, xla, *operands)


def gather_context(
    cache: jax.Array,
    page_table: jax.Array,
    starts: jax.Array,
    cu_kv_lens: jax.Array,
    *,
    workspace_tokens: int,
    dtype: Any,
    layer: int | jax.Array | None = None,
    k_scale: jax.Array | float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One chunk of cached context, dequantised: token starts[b] + i of request b in row cu_kv_lens[b] + i.

    cache, layer, k_scale, page_table as for `mla_decode`; starts [B] and cu_kv_lens [B + 1] int32, one chunk of a
    ContextPlan's. workspace_tokens: static, W. dtype: bf16, fp16 or fp32, to which values times k_scale are rounded.

    Returns the latents [W, 512] and the rope keys [W, 64] in dtype. A row of no request, or on a page or layer out of
    range, is zero. Raises ValueError for wrong shapes or dtypes, NotImplementedError where a named implementation
    cannot serve.
    """
    cache, layer = _checks.cache(cache, layer)
    k_scale = _checks.k_scale(k_scale, cache)
    page_table = _checks.int32("page_table", page_table, ("B", "max_pages"))
    batch = page_table.shape[0]
    starts = _checks.int32("starts", starts, (batch,))
    cu_kv_lens = _checks.int32("cu_kv_lens", cu_kv_lens, (batch + 1,))
    workspace_tokens = _checks.positive("workspace_tokens", workspace_tokens)
    kind = jnp.dtype(dtype).name
    if kind not in _checks.FLOATS:
        raise ValueError(f"dtype is {kind}; expected {' or '.join(_checks.FLOATS)}")
    choices = dispatch.select(
        "mla_context", implementation=implementation, q_dtype=kind, cache_dtype=_checks.cache_dtype_name(cache)
    )
    call = _Gather(workspace_tokens, kind, choices, implementation is not None)
    return _gather(cache, layer, k_scale, page_table, starts, cu_kv_lens, call=call)


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
    carry: tuple[jax.Array, jax.Array] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of new tokens to the cached context of their requests, without a causal mask.

    q [T, H, 192] in bf16, fp16 or fp32; cache, layer, k_scale as for `mla_decode`; page_table [B, max_pages] int32;
    plan: from `plan_context`. w_kv_b [512, H, 256]: the up-projection of a latent to 128 nope columns and 128 of
    value; or a function from latents [W, 512] in q's dtype to [W, H, 256]. The latent is cast to the weights' dtype,
    whatever the cache holds, and keys and values to q's. cu_q_lens [B + 1] int32. scale: static (192 ** -0.5). carry:
    (out [T, H, 128], lse [T, H]) in fp32, into which the result is merged.

    Memory, beside operands and results, whatever the length of the context: with W = plan.workspace_tokens, a workspace
    of latents [W, 576] in the weights' dtype, keys and values [W, H, 256] in q's, and the fp32 carry. A kernel that
    takes whole keys alone (`mla_prefill`) adds those, [W, H, 192].

    implementation: of the gather; the attention takes its best. "xla" is the reference throughout.

    Returns out [T, H, 128] in q's dtype (fp32 with a carry) and lse [T, H] fp32, natural: merge them with the attention
    of the new tokens to themselves, or give them to `mla_prefill` as its carry. A request without context has out 0 and
    lse -inf. Raises ValueError or NotImplementedError while tracing, as `mla_decode`.
    """
    q = _checks.array("q", q)
    _checks.dtype("q", q, _checks.FLOATS)
    _checks.shape("q", q, ("T", "H", _checks.HEAD_DIM))
    tokens, num_heads, _ = q.shape
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
    if carry is not None:
        carry = tuple(_checks.array(f"carry[{i}]", x) for i, x in enumerate(carry))
        for name, x, shape in zip(("out", "lse"), carry, ((_checks.NOPE,), ()), strict=True):
            _checks.dtype(f"carry ({name})", x, ("float32",))
            _checks.shape(f"carry ({name})", x, (tokens, num_heads, *shape))
    kind = _checks.cache_dtype_name(cache)
    dispatch.select("mla_context", implementation=implementation, q_dtype=q.dtype.name, cache_dtype=kind)
    call = _Call(_checks.number("scale", scale), implementation)
    # A function cannot be an argument of jit; its caller jits around the whole call.
    scan = _scan if callable(w_kv_b) else _jitted_scan
    return scan(call, q, cache, page_table, plan, w_kv_b, cu_q_lens, layer, k_scale, carry)


# Plans with room for more chunks run a loop of as many steps as there are chunks.
_SKIPPED_CHUNKS = 16

_State = tuple[jax.Array, jax.Array]


def _over_chunks(attend: Callable[[jax.Array, _State], _State], plan: ContextPlan, state: _State) -> _State:
    """attend(chunk, state) over the plan's chunks in order.

    On a GPU the host reads the condition of a loop of unknown length, and the device waits for it at each step. A
    conditional is captured in a graph and decided on the device: a step that has no chunk costs a graph's launch.
    """
    if plan.max_chunks > _SKIPPED_CHUNKS:
        return jax.lax.fori_loop(0, jnp.minimum(plan.num_chunks, plan.max_chunks), attend, state)

    def step(chunk: jax.Array, state: _State) -> _State:
        return jax.lax.cond(chunk < plan.num_chunks, functools.partial(attend, chunk), lambda state: state, state)

    return jax.lax.fori_loop(0, plan.max_chunks, step, state)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static in one call of mla_context."""

    scale: float
    implementation: str | None


def _scan(call: _Call, q, cache, page_table, plan: ContextPlan, w_kv_b, cu_q_lens, layer, k_scale, carry):
    if call.implementation == dispatch.XLA:
        return reference.mla_context(
            q, cache, page_table, plan, w_kv_b, cu_q_lens=cu_q_lens, scale=call.scale, layer=layer, k_scale=k_scale,
            carry=carry,
        )  # fmt: skip
    tokens, num_heads, _ = q.shape
    empty = jnp.zeros((tokens, num_heads, _checks.NOPE)), jnp.full((tokens, num_heads), -jnp.inf, jnp.float32)
    if 0 in (*q.shape, *page_table.shape, cache.size):
        return carry or (empty[0].astype(q.dtype), empty[1])
    pages, page_size = cache.shape[-3:-1]
    page_table, starts, cu_kv_lens = reference.readable_context(
        page_table, plan.starts, plan.cu_kv_lens, pages=pages, page_size=page_size,
        workspace_tokens=plan.workspace_tokens,
        readable_layer=layer is None or (layer >= 0) & (layer < cache.shape[0]),
    )  # fmt: skip

    def attend(chunk: jax.Array | int, carry: _State | None) -> _State:
        latent, rope = gather_context(
            cache, page_table, starts[chunk], cu_kv_lens[chunk], workspace_tokens=plan.workspace_tokens,
            dtype=reference.latent_dtype(q, w_kv_b), layer=layer, k_scale=k_scale, implementation=call.implementation,
        )  # fmt: skip
        kv_up = _checks.array("w_kv_b(latents)", reference.up_project(latent, w_kv_b))
        _checks.shape("w_kv_b(latents)", kv_up, (plan.workspace_tokens, num_heads, 2 * _checks.NOPE))
        _checks.dtype("w_kv_b(latents)", kv_up, _checks.FLOATS)
        kv_up = kv_up.astype(q.dtype)
        keys = kv_up, rope.astype(q.dtype)
        return mla_prefill(
            q, keys, kv_up, cu_q_lens, cu_kv_lens[chunk], causal=False, scale=call.scale, value_offset=_checks.NOPE,
            carry=carry,
        )  # fmt: skip

    if carry is None and plan.max_chunks == 1:  # writes every row, that of a request without context too
        return attend(0, None)
    # What varies over the axes of a shard_map decides the type of the carry.
    state = reference.varying_like(
        empty if carry is None else carry, q, cache, page_table, plan, w_kv_b, cu_q_lens, layer, k_scale, carry
    )
    out, lse = _over_chunks(attend, plan, state)
    return (out.astype(q.dtype) if carry is None else out), lse


_jitted_scan = jax.jit(_scan, static_argnums=0)
