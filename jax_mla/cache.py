"""The life of a paged latent cache: allocation, slots, updates in place, copies of pages."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_mla import _checks, _ffi, dispatch, reference
from jax_mla.dispatch import Choice


def allocate_cache(
    num_pages: int, page_size: int = 64, *, dtype: Any = jnp.bfloat16, layers: int | None = None
) -> jax.Array:
    """A zeroed cache: [num_pages, page_size, width], or [layers, ...] with `layers`.

    dtype: bfloat16, float16, float32 or an fp8 (e4m3) with width 576; or "fp8_ds_mla", which is uint8 with width 656.
    A token takes 1152 bytes in the 16-bit dtypes, 2304 in float32, 576 in fp8 and 656 as fp8_ds_mla, in each layer.
    A page size of 64 is the fast one. Raises ValueError for other dtypes, and for sizes below 1.
    """
    if isinstance(dtype, str) and dtype == _checks.DS_MLA:
        kind, width = jnp.dtype(jnp.uint8), _checks.DS_MLA_WIDTH
    else:
        kind, width = jnp.dtype(dtype), _checks.WIDTH
        accepted = (*_checks.FLOATS, *_checks.FP8)
        if kind.name not in accepted:
            raise ValueError(f"dtype is {kind.name}; expected {', '.join(accepted)} or {_checks.DS_MLA!r}")
    shape = (_checks.positive("num_pages", num_pages), _checks.positive("page_size", page_size), width)
    if layers is not None:
        shape = (_checks.positive("layers", layers), *shape)
    return jnp.zeros(shape, kind)


def slots(
    page_table: jax.Array, positions: jax.Array, page_size: int, *, request: jax.Array | None = None
) -> jax.Array:
    """The slot (page * page_size + offset) of each position; -1 where there is none.

    page_table [B, max_pages] int32. positions [B] or [B, N] int32, counted from the start of each sequence; or [T]
    with request [T] int32, the sequence of each. Returns int32 slots of positions' shape: -1 for a negative position
    or request, one past the table, and one on a negative page id. Raises ValueError for wrong shapes or dtypes.
    """
    page_table = _checks.int32("page_table", page_table, ("B", "max_pages"))
    page_size = _checks.positive("page_size", page_size)
    positions = _checks.array("positions", positions)
    if request is not None:
        request = _checks.int32("request", request, ("T",))
        positions = _checks.int32("positions", positions, request.shape)
    else:
        lead = (page_table.shape[0],)
        positions = _checks.int32("positions", positions, lead if positions.ndim == 1 else (*lead, "N"))
    return reference.slots(page_table, positions, page_size, request=request)


def copy_pages(cache: jax.Array, source_pages: jax.Array, target_pages: jax.Array) -> jax.Array:
    """Copies whole pages within a cache (of all layers when stacked), as when sequences that share a page part.

    cache: any layout. source_pages, target_pages [N] int32, distinct targets; a pair with an id out of range (or
    negative) is skipped. In place when the cache is donated. Raises ValueError for wrong shapes or dtypes.
    """
    cache = _checks.array("cache", cache)
    cache, _ = _checks.cache(cache, 0 if cache.ndim == 4 else None)
    source_pages = _checks.int32("source_pages", source_pages, ("N",))
    target_pages = _checks.int32("target_pages", target_pages, source_pages.shape)
    return reference.copy_pages(cache, source_pages, target_pages)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static in one call of update_cache."""

    saturate: bool
    power_of_two_scales: bool
    choices: tuple[Choice, ...]
    named: bool


def _native(call: _Call, choice: Choice, cache, kv_c, k_pe, slot_mapping, layer, k_scale):
    del choice
    stacked = cache if cache.ndim == 4 else cache[None]
    updated = _ffi.update_cache(
        stacked, kv_c, k_pe, slot_mapping, layer, k_scale, saturate=call.saturate,
        power_of_two_scales=call.power_of_two_scales,
    )  # fmt: skip
    return updated.reshape(cache.shape)


def _xla(call: _Call, cache, kv_c, k_pe, slot_mapping, layer, k_scale):
    return reference.update_cache(
        cache, kv_c, k_pe, slot_mapping, layer=layer, k_scale=k_scale, saturate=call.saturate,
        power_of_two_scales=call.power_of_two_scales,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("call",))
def _update(cache, kv_c, k_pe, slot_mapping, layer, k_scale, *, call: _Call):
    @jax.custom_batching.custom_vmap
    def update(*operands):
        native, xla = functools.partial(_native, call), functools.partial(_xla, call)
        return dispatch.run(call.choices, call.named, native, xla, *operands)

    @update.def_vmap
    def refuse(axis_size, in_batched, *operands):
        raise NotImplementedError(
            "vmap of update_cache: it would copy the cache for every mapped call. Write all tokens in one call instead"
        )

    return update(cache, kv_c, k_pe, slot_mapping, layer, k_scale)


def update_cache(
    cache: jax.Array,
    kv_c: jax.Array,
    k_pe: jax.Array,
    slot_mapping: jax.Array,
    *,
    layer: int | jax.Array | None = None,
    k_scale: jax.Array | float | None = None,
    saturate: bool = False,
    power_of_two_scales: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Writes tokens into their slots of a paged cache, and returns it; in place when the cache is donated to jit.

    cache: [pages, P, width], or [layers, pages, P, width] with `layer` (out of range writes nothing). kv_c [T, 512],
    k_pe [T, 64]: the normalised latent and the rope key, both of the cache's dtype, or bf16, fp16 or fp32 for an fp8
    cache. slot_mapping [T] int32: page * P + offset; -1, and any slot out of range, is skipped. Slots should be
    distinct: of duplicates the last token wins, whole.

    Per-tensor fp8 stores value / k_scale (an fp32 scalar, or [layers]; None = 1), cast as `astype` does: out of range
    becomes NaN, or is clamped with saturate. fp8_ds_mla stores a scale for each 128 latent values: max(amax, 1e-4) /
    448, rounded up to a power of two with power_of_two_scales.

    Raises ValueError for wrong shapes, dtypes and options while tracing, NotImplementedError where a named
    implementation cannot serve, and under vmap.
    """
    cache, layer = _checks.cache(cache, layer)
    kv_c, k_pe = _checks.array("kv_c", kv_c), _checks.array("k_pe", k_pe)
    _checks.shape("kv_c", kv_c, ("T", _checks.LATENT))
    tokens = kv_c.shape[0]
    _checks.shape("k_pe", k_pe, (tokens, _checks.ROPE))
    slot_mapping = _checks.int32("slot_mapping", slot_mapping, (tokens,))
    kind = _checks.cache_dtype_name(cache)
    _checks.dtype("kv_c", kv_c, (kind,) if kind in _checks.FLOATS else _checks.FLOATS)
    _checks.dtype("k_pe", k_pe, (kv_c.dtype.name,))
    k_scale = _checks.k_scale(k_scale, cache)
    saturate = _checks.flag("saturate", saturate)
    power_of_two_scales = _checks.flag("power_of_two_scales", power_of_two_scales)
    if saturate and kind not in _checks.FP8:
        raise ValueError(f"saturate is given for a {kind} cache; it belongs to per-tensor fp8 caches")
    if power_of_two_scales and kind != _checks.DS_MLA:
        raise ValueError(f"power_of_two_scales is given for a {kind} cache; it belongs to {_checks.DS_MLA}")
    if tokens == 0 or cache.size == 0:
        return cache
    choices = dispatch.select("update_cache", implementation=implementation, q_dtype=kv_c.dtype.name, cache_dtype=kind)
    call = _Call(saturate, power_of_two_scales, choices, implementation is not None)
    return _update(cache, kv_c, k_pe, slot_mapping, layer, k_scale, call=call)
