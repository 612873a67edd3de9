"""The paged latent cache: its layouts, writing, reading by slot, copying pages."""

import jax
import jax.numpy as jnp

from jax_mla.reference.attend import LATENT, ROPE, WIDTH, cast, divide

# fp8_ds_mla, the layout of DeepSeek's sparse attention: of a token 512 e4m3 values, a scale for each 128, bf16 rope.
DS_MLA = "fp8_ds_mla"
DS_MLA_BYTES = 656
_GROUP = 128
_E4M3_MAX = 448.0
_MIN_AMAX = 1e-4  # keeps the scale of an all-zero group a normal number


def allocate_cache(num_pages: int, page_size: int = 64, *, dtype=jnp.bfloat16, layers: int | None = None) -> jax.Array:
    """Zeros, [pages, P, width] or [layers, pages, P, width]."""
    width, dtype = (DS_MLA_BYTES, jnp.uint8) if dtype == DS_MLA else (WIDTH, dtype)
    shape = (num_pages, page_size, width)
    return jnp.zeros(shape if layers is None else (layers, *shape), dtype)


def slots(
    page_table: jax.Array, positions: jax.Array, page_size: int, *, request: jax.Array | None = None
) -> jax.Array:
    """Slots of the tokens at `positions`: [B, ...] row by row of the table, or [...] of the rows that `request` names.

    -1 where the table has no page: a position or request outside it, or an entry below 0.
    """
    batch, max_pages = page_table.shape
    positions = jnp.asarray(positions, jnp.int32)
    if request is None:
        rows = jnp.arange(batch, dtype=jnp.int32)
        request = jnp.broadcast_to(rows.reshape(-1, *[1] * (positions.ndim - 1)), positions.shape)
    page_index, offset = positions // page_size, positions % page_size
    if batch == 0 or max_pages == 0:
        return jnp.full(positions.shape, -1, jnp.int32)
    inside = (positions >= 0) & (page_index < max_pages) & (request >= 0) & (request < batch)
    page = page_table[jnp.clip(request, 0, batch - 1), jnp.clip(page_index, 0, max_pages - 1)].astype(jnp.int32)
    largest = (jnp.iinfo(jnp.int32).max - offset) // page_size  # past it the slot would wrap around to a wrong one
    return jnp.where(inside & (page >= 0) & (page <= largest), page * page_size + offset, -1)


def _by_slot(cache: jax.Array) -> jax.Array:
    """[layers, slots, width]"""
    layers = cache.shape[0] if cache.ndim == 4 else 1
    return cache.reshape(layers, cache.shape[-3] * cache.shape[-2], cache.shape[-1])


def _layer_index(layer: jax.Array | int | None, layers: int) -> tuple[jax.Array, jax.Array]:
    """The layer as a safe index, and whether it was one."""
    layer = jnp.asarray(0 if layer is None else layer, jnp.int32)
    return jnp.clip(layer, 0, max(layers - 1, 0)), (layer >= 0) & (layer < layers)


def _layer_scale(k_scale: jax.Array | None, layer: jax.Array) -> jax.Array | None:
    if k_scale is None or jnp.ndim(k_scale) == 0:
        return k_scale
    return jnp.asarray(k_scale)[layer]


def gather_rows(
    cache: jax.Array, slots: jax.Array, *, layer: jax.Array | int | None, k_scale: jax.Array | None, dtype
) -> tuple[jax.Array, jax.Array]:
    """Dequantised rows [..., 576] of `slots` [...], and which of them exist; what the others hold means nothing."""
    # XLA's CPU gathers fp8 and bf16 through a wider copy, made ahead of a loop for the whole cache: tying the cache to
    # the slots keeps that inside, for the gathered rows alone.
    cache, slots = jax.lax.optimization_barrier((cache, slots))
    by_slot = _by_slot(cache)
    layers, num_slots, _ = by_slot.shape
    if layers == 0 or num_slots == 0:
        return jnp.zeros((*slots.shape, WIDTH), dtype), jnp.zeros(slots.shape, bool)
    layer, known_layer = _layer_index(layer, layers)
    readable = known_layer & (slots >= 0) & (slots < num_slots)
    rows = by_slot[layer, jnp.clip(slots, 0, num_slots - 1)]
    if cache.dtype == jnp.uint8:
        return _unpack_ds_mla(rows, dtype), readable
    if k_scale is not None:
        working = jnp.promote_types(dtype, jnp.float32)
        rows = rows.astype(working) * jnp.asarray(_layer_scale(k_scale, layer), working)
    return rows.astype(dtype), readable


def gather_cache(
    cache: jax.Array,
    slots: jax.Array,
    *,
    layer: jax.Array | int | None = None,
    k_scale: jax.Array | None = None,
    dtype=jnp.float32,
) -> jax.Array:
    """Latent and rope [..., 576] of the tokens at `slots` [...], dequantised; zeros for a slot outside the cache."""
    rows, readable = gather_rows(cache, slots, layer=layer, k_scale=k_scale, dtype=dtype)
    return jnp.where(readable[..., None], rows, jnp.zeros((), dtype))


def _unpack_ds_mla(rows: jax.Array, dtype) -> jax.Array:
    """uint8 [..., 656] -> [..., 576]"""
    shape, working = rows.shape[:-1], jnp.promote_types(dtype, jnp.float32)
    values, scales, rope = jnp.split(rows, [LATENT, DS_MLA_BYTES - 2 * ROPE], axis=-1)
    values = jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(working)
    scales = jax.lax.bitcast_convert_type(scales.reshape(*shape, LATENT // _GROUP, 4), jnp.float32).astype(working)
    rope = jax.lax.bitcast_convert_type(rope.reshape(*shape, ROPE, 2), jnp.bfloat16).astype(working)
    latent = values.reshape(*shape, LATENT // _GROUP, _GROUP) * scales[..., None]
    return jnp.concatenate([latent.reshape(*shape, LATENT), rope], axis=-1).astype(dtype)


def _pack_ds_mla(kv_c: jax.Array, k_pe: jax.Array, power_of_two_scales: bool) -> jax.Array:
    """[T, 512] and [T, 64] -> uint8 [T, 656]; a value that is not finite becomes NaN and has no part in its scale."""
    tokens = kv_c.shape[0]
    groups = kv_c.astype(jnp.float32).reshape(tokens, LATENT // _GROUP, _GROUP)
    finite = jnp.isfinite(groups)
    amax = jnp.max(jnp.where(finite, jnp.abs(groups), 0.0), axis=-1)
    scales = divide(jnp.maximum(amax, _MIN_AMAX), _E4M3_MAX)
    if power_of_two_scales:
        bits = jax.lax.bitcast_convert_type(scales, jnp.int32)
        scales = jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    values = jnp.where(finite, divide(groups, scales[..., None]), jnp.nan).astype(jnp.float8_e4m3fn)
    as_bytes = (
        jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(tokens, -1),
        jax.lax.bitcast_convert_type(scales, jnp.uint8).reshape(tokens, -1),
        jax.lax.bitcast_convert_type(k_pe.astype(jnp.bfloat16), jnp.uint8).reshape(tokens, -1),
    )
    return jnp.concatenate(as_bytes, axis=-1)


def _last_wins(targets: jax.Array, limit: int) -> jax.Array:
    """`targets` [T], with all but the last of equal ones replaced by `limit`, as are those outside [0, limit)."""
    targets = jnp.where((targets >= 0) & (targets < limit), targets, limit)
    order = jnp.argsort(targets, stable=True)
    ascending = targets[order]
    last = jnp.concatenate([ascending[1:] != ascending[:-1], jnp.ones(1, bool)])
    return targets.at[order].set(jnp.where(last, ascending, limit))


def update_cache(
    cache: jax.Array,
    kv_c: jax.Array,
    k_pe: jax.Array,
    slot_mapping: jax.Array,
    *,
    layer: jax.Array | int | None = None,
    k_scale: jax.Array | None = None,
    saturate: bool = False,
    power_of_two_scales: bool = False,
) -> jax.Array:
    """The cache with token t's latent and rope at slot ``slot_mapping[t]``; of equal slots the last token wins."""
    by_slot = _by_slot(cache)
    layers, num_slots, _ = by_slot.shape
    if kv_c.shape[0] == 0 or by_slot.size == 0:
        return cache
    layer, known_layer = _layer_index(layer, layers)
    if cache.dtype == jnp.uint8:
        rows = _pack_ds_mla(kv_c, k_pe, power_of_two_scales)
    else:
        rows = jnp.concatenate([kv_c, k_pe], axis=-1)
        if k_scale is not None:
            rows = divide(rows.astype(jnp.float32), _layer_scale(k_scale, layer))
        rows = cast(rows, cache.dtype, saturate)
    targets = _last_wins(jnp.where(known_layer, slot_mapping, -1), num_slots)
    return by_slot.at[layer, targets].set(rows, mode="drop").reshape(cache.shape)


def copy_pages(cache: jax.Array, source_pages: jax.Array, target_pages: jax.Array) -> jax.Array:
    """The cache with whole pages copied, in every layer: all are read before any is written.

    A pair with a page outside the cache is skipped; of equal targets the last wins.
    """
    pages = cache.shape[-3]
    if cache.size == 0 or source_pages.shape[0] == 0:
        return cache
    known_source = (source_pages >= 0) & (source_pages < pages)
    targets = _last_wins(jnp.where(known_source, target_pages, -1), pages)
    sources = jnp.clip(source_pages, 0, pages - 1)
    return cache.at[..., targets, :, :].set(cache[..., sources, :, :], mode="drop")
