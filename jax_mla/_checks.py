"""Checks of arguments while tracing: each error names the argument, what it is, and what would do."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla.heads import is_valid_count

LATENT = 512
ROPE = 64
WIDTH = LATENT + ROPE
NOPE = 128  # also the width of a value
HEAD_DIM = NOPE + ROPE
DS_MLA_WIDTH = 656  # bytes a token: 512 e4m3 values, 4 fp32 scales, 64 bf16 rope values
DS_MLA = "fp8_ds_mla"

FLOATS = ("bfloat16", "float16", "float32")
FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")


def array(name: str, x: Any) -> jax.Array:
    """x as an array; refuses what is none, and what is sharded over explicit axes (a custom call would gather it)."""
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        raise ValueError(f"{name} is a {type(x).__name__}; expected an array")
    x = jnp.asarray(x)
    spec = jax.typeof(x).sharding.spec
    if any(axis is not None for axis in spec):
        raise ValueError(
            f"{name} is sharded as {spec} over explicit mesh axes; a native call would gather it. Call it through "
            "jax_mla.sharded_decode, or inside jax.shard_map"
        )
    return x


def shape(name: str, x: jax.Array, expected: Sequence[int | str]) -> None:
    """Refuses x unless its shape is `expected`, where a string stands for any size and serves as its name."""
    fits = len(x.shape) == len(expected) and all(
        isinstance(e, str) or e == n for n, e in zip(x.shape, expected, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} has shape {list(x.shape)}; expected [{', '.join(map(str, expected))}]")


def dtype(name: str, x: jax.Array | jax.ShapeDtypeStruct, accepted: Sequence[str]) -> None:
    if x.dtype.name not in accepted:
        raise ValueError(f"{name} has dtype {x.dtype.name}; expected {' or '.join(accepted)}")


def int32(name: str, x: Any, expected: Sequence[int | str]) -> jax.Array:
    x = array(name, x)
    dtype(name, x, ("int32",))
    shape(name, x, expected)
    return x


def fp32_scalar(name: str, x: Any) -> jax.Array | None:
    """A scale: None, or an fp32 scalar (a Python number counts)."""
    return None if x is None else _fp32(name, x, ())


def _fp32(name: str, x: Any, expected: Sequence[int]) -> jax.Array:
    if isinstance(x, numbers.Real) and not isinstance(x, np.generic):
        x = jnp.float32(x)
    x = array(name, x)
    dtype(name, x, ("float32",))
    shape(name, x, expected)
    return x


def number(name: str, x: Any) -> float:
    """A static Python or NumPy number, finite."""
    if isinstance(x, jax.Array) or not isinstance(x, numbers.Real | np.generic):
        raise ValueError(f"{name} is a {type(x).__name__}; expected a static Python number")
    if not math.isfinite(x):
        raise ValueError(f"{name} is {x}; expected a finite number")
    return float(x)


def flag(name: str, x: Any) -> bool:
    if not isinstance(x, bool | np.bool_):
        raise ValueError(f"{name} is {x!r}; expected a static True or False")
    return bool(x)


def positive(name: str, x: Any) -> int:
    if isinstance(x, bool) or not isinstance(x, int | np.integer) or x < 1:
        raise ValueError(f"{name} is {x!r}; expected a static positive integer")
    return int(x)


def num_heads(name: str, count: int) -> None:
    if not is_valid_count(count):
        raise NotImplementedError(f"{name} has {count} heads; jax_mla takes 1 to 128, and multiples of 16 beyond")


def queries(q: Any, lead: Sequence[str] | None) -> tuple[jax.Array, jax.Array | None]:
    """One array [*lead, H, 576] -> it and None; the pair [*lead, H, 512], [*lead, H, 64] of one dtype -> both.

    lead: names of the leading axes, None for any.
    """
    parts = tuple(q) if isinstance(q, tuple | list) else (q,)
    if len(parts) not in (1, 2):
        raise ValueError(f"q is a tuple of {len(parts)}; expected one array, or the pair (latent, rope)")
    names = ("q",) if len(parts) == 1 else ("q[0] (latent)", "q[1] (rope)")
    widths = (WIDTH,) if len(parts) == 1 else (LATENT, ROPE)
    arrays = [array(name, part) for name, part in zip(names, parts, strict=True)]
    axes = [f"axis {i}" for i in range(arrays[0].ndim - 2)] if lead is None else list(lead)
    for name, part, width in zip(names, arrays, widths, strict=True):
        shape(name, part, [*axes, "H", width])
    first, last = arrays[0], arrays[-1]
    if first.shape[:-1] != last.shape[:-1] or first.dtype != last.dtype:
        raise ValueError(
            f"q's latent is {first.dtype.name}{list(first.shape)} and its rope {last.dtype.name}{list(last.shape)}; "
            "expected one dtype and one leading shape"
        )
    num_heads("q", first.shape[-2])
    return first, (last if len(arrays) == 2 else None)


def cache(x: Any, layer: Any, name: str = "cache") -> tuple[jax.Array, jax.Array | None]:
    """[pages, P, width] or [layers, pages, P, width] with its layer -> the cache, and layer as an int32 scalar.

    width is 576, or 656 for uint8 (fp8_ds_mla).
    """
    x = array(name, x)
    cache_layout(name, x)
    if (layer is None) != (x.ndim == 3):
        state = "is needed for a stacked" if layer is None else "is given for an unstacked"
        raise ValueError(f"layer {state} cache: {name} has shape {list(x.shape)}")
    return x, None if layer is None else _layer(layer)


def cache_layout(name: str, x: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Refuses what is no cache's shape and dtype."""
    dtype(name, x, (*FLOATS, *FP8, "uint8"))
    width = DS_MLA_WIDTH if x.dtype == jnp.uint8 else WIDTH
    if x.ndim not in (3, 4) or x.shape[-1] != width:
        raise ValueError(
            f"{name} has shape {list(x.shape)} in {x.dtype.name}; expected [pages, page size, {width}] or "
            f"[layers, pages, page size, {width}]"
        )
    if x.shape[-2] == 0:
        raise ValueError(f"{name} has shape {list(x.shape)}; expected a page size of at least 1")


def _layer(layer: Any) -> jax.Array:
    if isinstance(layer, int | np.integer) and not isinstance(layer, bool):
        if not -(2**31) <= layer < 2**31:
            raise ValueError(f"layer is {layer}; expected a value of int32")
        return jnp.int32(layer)
    return int32("layer", layer, ())


def cache_dtype_name(x: jax.Array) -> str:
    """The cache's dtype as the capability table names it."""
    return DS_MLA if x.dtype == jnp.uint8 else x.dtype.name


def k_scale(scale: Any, cache: jax.Array) -> jax.Array | None:
    """The scale of a per-tensor fp8 cache: an fp32 scalar, or [layers] for a stacked cache; refused for any other."""
    if scale is None:
        return None
    if cache.dtype.name not in FP8:
        kind = cache_dtype_name(cache)
        raise ValueError(f"k_scale is given for a {kind} cache; it belongs to per-tensor fp8 caches alone")
    stacked = cache.ndim == 4 and getattr(scale, "ndim", 0) == 1
    return _fp32("k_scale", scale, (cache.shape[0],) if stacked else ())


def q_and_cache_dtypes(q: jax.Array, cache: jax.Array, q_scale: Any) -> None:
    """q and cache alike in a float; a 16-bit q over an fp8 cache; an fp8 q over a cache of its format, with q_scale."""
    kind, cached = q.dtype.name, cache_dtype_name(cache)
    dtype("q", q, (*FLOATS, *FP8))
    fits = (
        kind == cached
        if kind in FLOATS and cached in FLOATS
        else kind in ("bfloat16", "float16")
        if kind in FLOATS
        else kind == cached
    )
    if not fits:
        raise ValueError(
            f"q is {kind} over a {cached} cache; expected both alike in bfloat16, float16 or float32, a bfloat16 or "
            "float16 q over an fp8 cache, or both in the same fp8 format"
        )
    if q_scale is not None and kind not in FP8:
        raise ValueError(f"q_scale is given for {kind} queries; it belongs to fp8 queries")
