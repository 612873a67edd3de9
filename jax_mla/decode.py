"""Absorbed attention over a paged latent cache, for one or several query tokens a sequence, and its work split.

Method: Multi-head Latent Attention, DeepSeek-V2 (arXiv:2405.04434), in its absorbed form: the up-projections of keys
and values are folded into the queries and the output, so that all heads attend to one latent vector a token.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_mla import _checks, _ffi, dispatch, reference
from jax_mla.dispatch import Choice
from jax_mla.heads import HeadSpecification


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("items", "part_offsets", "tile_splits"),
    meta_fields=("target", "heads", "batch", "cache_dtype"),
)
@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """How the work of a decode step is cut into even parts; a pytree, reusable by every layer of the step.

    items [max_items, 8] int32: pieces of work (request, row tile, first token, end token, partial slot or -1, 0, 0,
    0), sorted by part. part_offsets [parts + 1] int32: part p runs items part_offsets[p] to part_offsets[p + 1].
    tile_splits [B * row_tiles, 2] int32: first partial slot and count of the pieces of each tile.

    Static: target ("cpu", "cuda", "rocm", or "xla", which needs no split and has empty arrays), the head
    specification, and the shapes and cache dtype that it was made for.
    """

    items: jax.Array
    part_offsets: jax.Array
    tile_splits: jax.Array
    target: str
    heads: HeadSpecification | None
    batch: int
    cache_dtype: str


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static in one call of mla_decode."""

    scale: float
    causal: bool
    max_q_len: int
    choices: tuple[Choice, ...]
    named: bool


def _planned(choice: Choice, kv_lens: jax.Array, cu_q_lens: jax.Array | None) -> tuple[jax.Array, ...]:
    tuning = dispatch.PLANNER_TUNING[choice.platform]
    return _ffi.plan_decode(kv_lens, cu_q_lens, heads=choice.heads, **dataclasses.asdict(tuning))


@functools.partial(jax.jit, static_argnames=("choice",))
def _plan(kv_lens: jax.Array, cu_q_lens: jax.Array | None, *, choice: Choice) -> tuple[jax.Array, ...]:
    return dispatch.run((choice,), True, lambda c, *lens: _planned(c, *lens), None, kv_lens, cu_q_lens)


def native_choice(
    cache: Any, q_dtype: Any, num_heads: int, max_q_len: int, batch_invariant: bool, implementation: str | None
) -> Choice | None:
    """What runs a call over `cache` on the platform it is for; None where that is XLA. Arguments as `plan_decode`'s."""
    cache_dtype = _checks.cache_dtype_name(cache)
    if q_dtype is None:
        q_dtype = cache.dtype if cache_dtype in _checks.FLOATS else jnp.bfloat16
    choices = dispatch.select(
        "mla_decode",
        implementation=implementation,
        q_dtype=jnp.dtype(q_dtype).name,
        cache_dtype=cache_dtype,
        num_heads=num_heads,
        max_q_len=max_q_len,
        page_size=cache.shape[-2],
        batch_invariant=batch_invariant,
    )
    target = dispatch.default_platform() if implementation is None else implementation.partition(":")[0]
    return next((choice for choice in choices if choice.platform == target), None)


def plan_decode(
    kv_lens: jax.Array,
    *,
    num_heads: int,
    cache: jax.Array | jax.ShapeDtypeStruct,
    q_len: int | None = None,
    cu_q_lens: jax.Array | None = None,
    max_q_len: int | None = None,
    q_dtype: Any = None,
    causal: bool = True,
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> DecodePlan:
    """The work split of a decode step, computed on the device; pass it to every layer's `mla_decode`.

    kv_lens [B] int32: cached tokens, the queries' own included. num_heads: query heads of the calls. cache: an array
    or a ShapeDtypeStruct of the cache's shape and dtype. q_len: query tokens a sequence (default 1); or cu_q_lens
    [B + 1] int32 with a static max_q_len. q_dtype: of the queries, where it is not the cache's (default: the cache's,
    bfloat16 for fp8 caches). batch_invariant: a row's splits depend on its own length alone, so that its result has
    the same bits in every batch.

    A plan belongs to one target, this process's default backend or the one that `implementation` names. Rows whose
    kv_lens are 0 cost nothing. Raises ValueError for wrong shapes or dtypes, NotImplementedError for head counts that
    jax_mla does not take, or where a named implementation cannot serve.
    """
    kv_lens = _checks.int32("kv_lens", kv_lens, ("B",))
    batch = kv_lens.shape[0]
    _checks.positive("num_heads", num_heads)
    _checks.num_heads("num_heads", num_heads)
    causal, batch_invariant = _checks.flag("causal", causal), _checks.flag("batch_invariant", batch_invariant)
    if not hasattr(cache, "shape") or not hasattr(cache, "dtype"):
        raise ValueError(f"cache is a {type(cache).__name__}; expected an array or a jax.ShapeDtypeStruct")
    _checks.cache_layout("cache", cache)
    if cu_q_lens is None:
        if max_q_len is not None:
            raise ValueError("max_q_len is given without cu_q_lens; expected q_len for uniform queries")
        max_q_len = _checks.positive("q_len", 1 if q_len is None else q_len)
    else:
        if q_len is not None or max_q_len is None:
            raise ValueError("cu_q_lens is given; expected max_q_len beside it, and no q_len")
        cu_q_lens = _checks.int32("cu_q_lens", cu_q_lens, (batch + 1,))
        max_q_len = _checks.positive("max_q_len", max_q_len)
    cache_dtype = _checks.cache_dtype_name(cache)
    choice = native_choice(cache, q_dtype, num_heads, max_q_len, batch_invariant, implementation)
    if choice is None or batch == 0:
        empty = (jnp.zeros((0, 8), jnp.int32), jnp.zeros((1,), jnp.int32), jnp.zeros((0, 2), jnp.int32))
        return DecodePlan(*empty, target=dispatch.XLA, heads=None, batch=batch, cache_dtype=cache_dtype)
    arrays = _plan(kv_lens, cu_q_lens, choice=choice)
    return DecodePlan(*arrays, target=choice.platform, heads=choice.heads, batch=batch, cache_dtype=cache_dtype)


def _check_plan(plan: DecodePlan, choices: tuple[Choice, ...], batch: int, cache_dtype: str) -> tuple[Choice, ...]:
    """The choice that the plan was made for, with the plan's own split; ValueError if it was made for other shapes."""
    if not isinstance(plan, DecodePlan):
        raise ValueError(f"plan is a {type(plan).__name__}; expected what plan_decode returned")
    if plan.batch != batch or plan.cache_dtype != cache_dtype:
        raise ValueError(
            f"plan was made for {plan.batch} sequences over a {plan.cache_dtype} cache; "
            f"this call has {batch} over {cache_dtype}"
        )
    if plan.target == dispatch.XLA:
        return ()
    choice = next((c for c in choices if c.platform == plan.target), None)
    if choice is None:
        raise ValueError(f"plan was made for {plan.target}, which does not serve this call")
    # A batch-invariant plan serves calls that do not ask for one.
    expected = dataclasses.replace(choice.heads, batch_invariant=plan.heads.batch_invariant)
    if plan.heads != expected or (choice.heads.batch_invariant and not plan.heads.batch_invariant):
        raise ValueError(f"plan was made for {plan.heads}; this call needs {choice.heads}")
    return (dataclasses.replace(choice, heads=plan.heads),)


def _native(
    call: _Call, choice: Choice, q, q_rope, cache, page_table, kv_lens, cu_q_lens, layer, q_scale, k_scale, plan
):
    heads = choice.heads
    if plan is None:
        plan = _planned(choice, kv_lens, cu_q_lens)
    out, lse = _ffi.decode(
        heads.pad(q),
        None if q_rope is None else heads.pad(q_rope),
        cache if cache.ndim == 4 else cache[None],
        layer,
        page_table,
        kv_lens,
        cu_q_lens,
        q_scale,
        k_scale,
        plan,
        heads=heads,
        scale=call.scale,
        causal=call.causal,
        variant=choice.variant,
        out_dtype=q.dtype if q.dtype.name in _checks.FLOATS else jnp.bfloat16,
    )
    return heads.unpad(out), heads.unpad(lse)


def _xla(call: _Call, q, q_rope, cache, page_table, kv_lens, cu_q_lens, layer, q_scale, k_scale, plan):
    del plan
    tokens, num_heads = q.shape[:2]
    pair = q if q_rope is None else (q, q_rope)
    if cu_q_lens is None:
        lead = (kv_lens.shape[0], call.max_q_len)
        pair = jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), pair)
    out, lse = reference.mla_decode(
        pair, cache, page_table, kv_lens, scale=call.scale, causal=call.causal, cu_q_lens=cu_q_lens,
        max_q_len=None if cu_q_lens is None else call.max_q_len, layer=layer, q_scale=q_scale, k_scale=k_scale,
    )  # fmt: skip
    return out.reshape(tokens, num_heads, -1), lse.reshape(tokens, num_heads)


# Names of what _core takes, for errors of its batching rule.
_OPERANDS = ("q", "q_rope", "cache", "page_table", "kv_lens", "cu_q_lens", "layer", "q_scale", "k_scale", "plan")


def _core(call: _Call, *operands):
    """mla_decode on flat queries [T, H, width], with its rules for vmap and for differentiation."""
    native, xla, fold = (functools.partial(rule, call) for rule in (_native, _xla, _fold))
    return dispatch.run_decode("mla_decode", call.choices, call.named, native, xla, fold, *operands)


def _fold(call: _Call, size: int, in_batched, operands):
    """vmap over queries, page tables and lengths: the new axis becomes part of the batch of sequences."""
    named = dict(zip(_OPERANDS, operands, strict=True))
    is_batched = {name: any(jax.tree.leaves(flag)) for name, flag in zip(_OPERANDS, in_batched, strict=True)}
    for name in ("cache", "layer", "q_scale", "k_scale", "plan"):
        if is_batched[name]:
            raise NotImplementedError(
                f"vmap of mla_decode over {name}: it maps queries, page_table, kv_lens and cu_q_lens. "
                "Fold the axis into the pages of one cache instead"
            )

    def spread(name: str) -> jax.Array:
        return dispatch.spread(named[name], size, is_batched[name])

    q = spread("q")
    tokens = q.shape[1]
    page_table, kv_lens, cu_q_lens = spread("page_table"), spread("kv_lens"), named["cu_q_lens"]
    if cu_q_lens is not None:
        # Query tokens that no sequence of a mapped call owns become a sequence of their own, without keys.
        page_table = jnp.concatenate([page_table, jnp.full_like(page_table[:, :1], -1)], axis=1)
        kv_lens = jnp.concatenate([kv_lens, jnp.zeros_like(kv_lens[:, :1])], axis=1)
        starts = spread("cu_q_lens") + jnp.arange(size, dtype=jnp.int32)[:, None] * tokens
        cu_q_lens = jnp.concatenate([starts.reshape(-1), jnp.full((1,), size * tokens, jnp.int32)])
    batch = page_table.shape[0] * page_table.shape[1]
    named.update(
        q=q.reshape(size * tokens, *q.shape[2:]),
        page_table=page_table.reshape(batch, -1),
        kv_lens=kv_lens.reshape(batch),
        cu_q_lens=cu_q_lens,
        plan=None,  # made for one call of those that are mapped
    )
    if named["q_rope"] is not None:
        rope = spread("q_rope")
        named["q_rope"] = rope.reshape(size * tokens, *rope.shape[2:])
    out, lse = _core(call, *named.values())
    return out.reshape(size, tokens, *out.shape[1:]), lse.reshape(size, tokens, -1)


_decode = jax.jit(_core, static_argnums=0)


def _flat_queries(q: Any, cu_q_lens: Any, max_q_len: Any):
    """q in any form -> ([T, H, width], [T, H, 64] or None, leading shape, max_q_len or None)."""
    first, rope = _checks.queries(q, ("B", "Q") if cu_q_lens is None else ("T",))
    shape = first.shape[:-1]
    if cu_q_lens is None:
        if max_q_len not in (None, shape[1]):
            raise ValueError(f"max_q_len is {max_q_len}, and q has {shape[1]} query tokens a sequence")
        max_q_len = shape[1]
    elif max_q_len is None:
        raise ValueError("cu_q_lens is given without max_q_len; expected the static bound of query tokens a sequence")
    else:
        max_q_len = _checks.positive("max_q_len", max_q_len)
    flat = first.reshape(-1, *first.shape[-2:])
    return flat, None if rope is None else rope.reshape(-1, *rope.shape[-2:]), shape, max_q_len


def mla_decode(
    q: jax.Array | tuple[jax.Array, jax.Array],
    cache: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    causal: bool = True,
    cu_q_lens: jax.Array | None = None,
    max_q_len: int | None = None,
    layer: int | jax.Array | None = None,
    q_scale: jax.Array | float | None = None,
    k_scale: jax.Array | float | None = None,
    plan: DecodePlan | None = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Absorbed MLA attention over a paged cache: softmax(scale * q K^T) V, where V is K's first 512 columns.

    q: [B, Q, H, 576]; or [T, H, 576] with cu_q_lens [B + 1] int32 and a static max_q_len; or the pair (latent
    [.., 512], rope [.., 64]) of one dtype, never concatenated in memory. H: 1 to 128, and multiples of 16 beyond.
    cache: [pages, P, 576], or [layers, pages, P, 576] with `layer` (an int or an int32 scalar; out of range gives
    empty rows). Any page size P; 64 is the fast one. page_table [B, max_pages] int32, kv_lens [B] int32: cached
    tokens, the queries' own included. scale: static, of the scores before softmax (192 ** -0.5 for DeepSeek and Kimi).
    causal: query i of n sees keys up to kv_len - n + i; False lets every query see all.

    dtypes: q and cache alike in bf16, fp16 or fp32; or q bf16/fp16 over a cache in fp8 (per tensor, with `k_scale`:
    an fp32 scalar, or [layers]) or fp8_ds_mla (uint8 [.., 656]); or q fp8 with `q_scale` over a cache of its format.

    plan: from `plan_decode` for the same shapes and lengths; None plans here. batch_invariant: a row's bits do not
    depend on its batch (XLA on a GPU cannot promise that). implementation: None for the best, or a name, which serves
    the call or raises.

    Returns out (q's leading shape, 512) in q's dtype (bf16 for fp8 queries), and lse (q's leading shape) in fp32: the
    natural logarithm of the sum of exponentials. A row without keys has out 0 and lse -inf. What lies outside kv_lens
    is never read into a result; a page id out of range masks its tokens.

    Raises ValueError or NotImplementedError while tracing, for wrong shapes, dtypes, layouts or head counts; also when
    differentiated, and for vmap over anything but q, page_table, kv_lens and cu_q_lens.
    """
    cache, layer = _checks.cache(cache, layer)
    flat, rope, lead, max_q_len = _flat_queries(q, cu_q_lens, max_q_len)
    page_table = _checks.int32("page_table", page_table, ("B", "max_pages"))
    batch = page_table.shape[0]
    kv_lens = _checks.int32("kv_lens", kv_lens, (batch,))
    if cu_q_lens is not None:
        cu_q_lens = _checks.int32("cu_q_lens", cu_q_lens, (batch + 1,))
    elif lead[0] != batch:
        raise ValueError(f"q has {lead[0]} sequences and page_table {batch}; expected the same")
    _checks.q_and_cache_dtypes(flat, cache, q_scale)
    q_scale, k_scale = _checks.fp32_scalar("q_scale", q_scale), _checks.k_scale(k_scale, cache)
    scale, causal = _checks.number("scale", scale), _checks.flag("causal", causal)
    batch_invariant = _checks.flag("batch_invariant", batch_invariant)

    if 0 in flat.shape or cache.size == 0 or page_table.size == 0:
        # No query or no key: every row is empty, and no kernel is handed a buffer without memory.
        dtype = flat.dtype if flat.dtype.name in _checks.FLOATS else jnp.bfloat16
        return jnp.zeros((*lead, _checks.LATENT), dtype), jnp.full(lead, -jnp.inf, jnp.float32)
    cache_dtype = _checks.cache_dtype_name(cache)
    choices = dispatch.select(
        "mla_decode",
        implementation=implementation,
        q_dtype=flat.dtype.name,
        cache_dtype=cache_dtype,
        num_heads=flat.shape[1],
        max_q_len=max_q_len,
        page_size=cache.shape[-2],
        batch_invariant=batch_invariant,
    )
    named = implementation is not None
    arrays = None
    if plan is not None:
        choices, named = _check_plan(plan, choices, batch, cache_dtype), True
        if choices:
            arrays = (plan.items, plan.part_offsets, plan.tile_splits)
    call = _Call(scale, causal, max_q_len, choices, named)
    out, lse = _decode(call, flat, rope, cache, page_table, kv_lens, cu_q_lens, layer, q_scale, k_scale, arrays)
    return out.reshape(*lead, _checks.LATENT), lse.reshape(lead)
