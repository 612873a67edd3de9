"""Full keys and values for prefill from the up-projection and the rope key that all heads share, in one pass."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jax_mla import _checks, _ffi, dispatch, reference
from jax_mla.dispatch import Choice


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tiles"], meta_fields=["tokens"])
@dataclasses.dataclass(frozen=True)
class KernelValues:
    """Values of prefill in the layout that Hopper's fp8 kernel reads: `pack_kv_fp8(..., values="kernel")`.

    tiles [ceil(S / 16), H, 128, 16] in float8_e4m3fn: 16 tokens of each head, one column after the other, the tokens of
    a column in the order 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15, and zeros behind the last. tokens: S, static.
    A pytree, whose leaf can be sharded over its heads.
    """

    tiles: jax.Array
    tokens: int

    # As the capability table names it, where a dtype of values stands.
    KIND: ClassVar[str] = "kernel_values"


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static in one call."""

    dtype: str | None  # of an fp8 result; None: keys alone, in the input's dtype
    saturate: bool
    tiled: bool
    choices: tuple[Choice, ...]
    named: bool

    @property
    def operation(self) -> str:
        return "pack_kv" if self.dtype is None else "pack_kv_fp8"


def _native(call: _Call, choice: Choice, *operands):
    """The custom call; vmap makes its new axis more tokens."""

    @jax.custom_batching.custom_vmap
    def kernel(kv_up, k_pe, k_scale, packed_k_scale, packed_v_scale):
        if call.dtype is None:
            return _ffi.pack_kv(kv_up, k_pe, k_scale)
        return _ffi.pack_kv_fp8(
            kv_up, k_pe, k_scale, packed_k_scale, packed_v_scale, dtype=jnp.dtype(call.dtype), saturate=call.saturate,
            tiled=call.tiled,
        )  # fmt: skip

    @kernel.def_vmap
    def fold(size, in_batched, *operands):
        (kv_up, k_pe), scales = operands[:2], operands[2:]
        if any(jax.tree.leaves(in_batched[2:])):
            names = "k_scale" if call.dtype is None else "k_scale, packed_k_scale or packed_v_scale"
            raise NotImplementedError(f"vmap of {call.operation} over {names}: a scale is one a call")
        tokens = kv_up.shape[1 if in_batched[0] else 0]
        tiles = -(-tokens // reference.VALUE_TILE)
        each = tiles * reference.VALUE_TILE if call.tiled else tokens  # each call's begin with a tile

        def flat(x: jax.Array, batched: bool) -> jax.Array:
            x = dispatch.spread(x, size, batched)
            x = jnp.pad(x, ((0, 0), (0, each - tokens), *((0, 0),) * (x.ndim - 2)))
            return x.reshape(size * each, *x.shape[2:])

        packed = _native(call, choice, *map(flat, (kv_up, k_pe), in_batched[:2]), *scales)
        if call.dtype is None:
            return packed.reshape(size, tokens, *packed.shape[1:]), True
        k, v = packed
        k = k.reshape(size, each, *k.shape[1:])[:, :tokens]
        return (k, v.reshape(size, tiles if call.tiled else tokens, *v.shape[1:])), (True, True)

    return kernel(*operands)


def _xla(call: _Call, kv_up, k_pe, k_scale, packed_k_scale, packed_v_scale):
    if call.dtype is None:
        return reference.pack_kv(kv_up, k_pe, k_scale=k_scale)
    k, v = reference.pack_kv_fp8(
        kv_up, k_pe, k_scale=k_scale, packed_k_scale=packed_k_scale, packed_v_scale=packed_v_scale,
        dtype=jnp.dtype(call.dtype), saturate=call.saturate,
    )  # fmt: skip
    return k, reference.tile_values(v) if call.tiled else v


@functools.partial(jax.jit, static_argnames=("call",))
def _pack(*operands, call: _Call):
    native, xla = functools.partial(_native, call), functools.partial(_xla, call)
    pack = functools.partial(dispatch.run, call.choices, call.named, native, xla)
    instead = "mla_prefill with implementation='xla' has one, for keys as the pair (nope, k_pe)"
    return dispatch.without_derivative(call.operation, instead, pack)(*operands)


def _checked(kv_up: Any, k_pe: Any, k_scale: Any) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    kv_up, k_pe = _checks.array("kv_up", kv_up), _checks.array("k_pe", k_pe)
    _checks.dtype("kv_up", kv_up, _checks.FLOATS)
    _checks.shape("kv_up", kv_up, ("T", "H", 2 * _checks.NOPE))
    tokens = kv_up.shape[0]
    if k_pe.shape not in ((tokens, _checks.ROPE), (tokens, _checks.WIDTH)):
        raise ValueError(
            f"k_pe has shape {list(k_pe.shape)}; expected [{tokens}, {_checks.ROPE}], or the gathered latent rows "
            f"[{tokens}, {_checks.WIDTH}]"
        )
    _checks.dtype("k_pe", k_pe, (kv_up.dtype.name, *_checks.FP8))
    if k_scale is not None and k_pe.dtype.name not in _checks.FP8:
        raise ValueError(f"k_scale is given for a {k_pe.dtype.name} k_pe; it belongs to fp8")
    return kv_up, k_pe, _checks.fp32_scalar("k_scale", k_scale)


def pack_kv(
    kv_up: jax.Array, k_pe: jax.Array, *, k_scale: jax.Array | float | None = None, implementation: str | None = None
) -> jax.Array:
    """Keys of prefill: the nope part of the up-projection beside the rope key, repeated for every head.

    kv_up [T, H, 256] in bf16, fp16 or fp32: 128 nope columns, then 128 of value. k_pe [T, 64], or the gathered latent
    rows [T, 576] whose last 64 columns are taken; in kv_up's dtype, or fp8 with `k_scale` (fp32 scalar, None = 1), by
    which it is multiplied. Values need no packing: mla_prefill reads them in place from kv_up.

    Returns k [T, H, 192] in kv_up's dtype. Raises ValueError for wrong shapes or dtypes, NotImplementedError where a
    named implementation cannot serve, when differentiated, and, unless it is "xla", for vmap over k_scale.
    """
    kv_up, k_pe, k_scale = _checked(kv_up, k_pe, k_scale)
    kind = kv_up.dtype.name
    if kv_up.size == 0:
        return jnp.zeros((*kv_up.shape[:2], _checks.HEAD_DIM), kv_up.dtype)
    choices = dispatch.select("pack_kv", implementation=implementation, q_dtype=kind, cache_dtype=kind)
    call = _Call(None, False, False, choices, implementation is not None)
    return _pack(kv_up, k_pe, k_scale, None, None, call=call)


def pack_kv_fp8(
    kv_up: jax.Array,
    k_pe: jax.Array,
    *,
    k_scale: jax.Array | float | None = None,
    packed_k_scale: jax.Array | float | None = None,
    packed_v_scale: jax.Array | float | None = None,
    dtype: Any = jnp.float8_e4m3fn,
    saturate: bool = False,
    values: str = "plain",
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | KernelValues]:
    """Keys and values of prefill in fp8, in one pass.

    kv_up, k_pe, k_scale: as for `pack_kv`. Stored are key / packed_k_scale and value / packed_v_scale (fp32 scalars,
    None = 1), cast to dtype (an e4m3) as `astype` does: out of range becomes NaN, or is clamped with saturate. An fp8
    k_pe of that dtype is copied byte for byte where both its k_scale and packed_k_scale are 1.

    values: "plain", or "kernel" for KernelValues (e4m3fn alone), which Hopper's fp8 kernel reads; tokens have their
    places in it by their number in the array, so that a request may begin anywhere.

    Returns k [T, H, 192] and v [T, H, 128] in dtype, or v as KernelValues. Raises ValueError for wrong shapes, dtypes
    or values, NotImplementedError where a named implementation cannot serve, when differentiated, and, unless
    it is "xla", for vmap over the scales.
    """
    kv_up, k_pe, k_scale = _checked(kv_up, k_pe, k_scale)
    kind = jnp.dtype(dtype).name
    if kind not in _checks.FP8:
        raise ValueError(f"dtype is {kind}; expected {' or '.join(_checks.FP8)}")
    scales = [
        _checks.fp32_scalar(n, s) for n, s in (("packed_k_scale", packed_k_scale), ("packed_v_scale", packed_v_scale))
    ]
    saturate = _checks.flag("saturate", saturate)
    if values not in ("plain", "kernel"):
        raise ValueError(f"values is {values!r}; expected 'plain' or 'kernel'")
    tiled = values == "kernel"
    if tiled and kind != "float8_e4m3fn":
        raise ValueError(f"values is 'kernel' for dtype {kind}; expected float8_e4m3fn")
    tokens, num_heads, _ = kv_up.shape
    if kv_up.size == 0:
        k, v = (jnp.zeros((tokens, num_heads, width), dtype) for width in (_checks.HEAD_DIM, _checks.NOPE))
        return k, KernelValues(reference.tile_values(v), tokens) if tiled else v
    choices = dispatch.select("pack_kv_fp8", implementation=implementation, q_dtype=kv_up.dtype.name, cache_dtype=kind)
    call = _Call(kind, saturate, tiled, choices, implementation is not None)
    k, v = _pack(kv_up, k_pe, k_scale, *scales, call=call)
    return k, KernelValues(v, tokens) if tiled else v
