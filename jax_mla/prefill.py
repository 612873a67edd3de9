"""Attention over up-projected keys and values of a ragged batch, for prompts.

Method: exact softmax attention, causal to the bottom right, with the log-sum-exp that merging needs. Kernels work in
blocks with an online softmax: FlashAttention-2, Dao (arXiv:2307.08691).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_mla import _checks, _ffi, dispatch, reference
from jax_mla.dispatch import Choice
from jax_mla.pack import KernelValues


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static in one call of mla_prefill."""

    scale: float
    causal: bool
    value_offset: int
    choices: tuple[Choice, ...]
    named: bool
    differentiable: bool


def _packed(nope: jax.Array, k_pe: jax.Array) -> jax.Array:
    """Whole keys, for kernels that take no others."""
    if nope.shape[-1] == 2 * _checks.NOPE:
        return _ffi.pack_kv(nope, k_pe, None)
    return reference.pack_kv(nope, k_pe)


def _native(call: _Call, choice: Choice, *operands):
    """The custom call; vmap folds its new axis into the batch of sequences."""

    @jax.custom_batching.custom_vmap
    def kernel(q, k, v, cu_q_lens, cu_kv_lens, scales, carry):
        out_dtype = jnp.float32 if carry is not None else q.dtype if q.dtype.name in _checks.FLOATS else jnp.bfloat16
        if isinstance(k, tuple) and not choice.row.key_parts:
            k = _packed(*k)
        keys = k if isinstance(k, tuple) else (k, None)
        tiles_or_v = v.tiles if isinstance(v, KernelValues) else v
        return _ffi.prefill(
            q, *keys, tiles_or_v, cu_q_lens, cu_kv_lens, None, scales, carry, value_offset=call.value_offset,
            scale=call.scale, causal=call.causal, variant=choice.variant, out_dtype=out_dtype,
        )  # fmt: skip

    @kernel.def_vmap
    def fold(size, in_batched, *operands):
        if any(jax.tree.leaves(in_batched[_OPERANDS.index("scales")])):
            raise NotImplementedError("vmap of mla_prefill over q_scale, k_scale or v_scale: they are one a call")
        out, lse = _native(call, choice, *_folded(size, in_batched, operands))
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in (out, lse)), (True, True)

    return kernel(*operands)


# What _native and _xla take.
_OPERANDS = ("q", "k", "v", "cu_q_lens", "cu_kv_lens", "scales", "carry")


def _folded(size: int, in_batched, operands):
    """Operands of `size` calls as those of one, whose batch has the sequences of all of them."""

    def spread(x: jax.Array, batched: bool) -> jax.Array:
        return dispatch.spread(x, size, batched)

    spread_out = jax.tree.map(spread, tuple(operands), tuple(in_batched))
    q, k, v, cu_q_lens, cu_kv_lens, _, carry = spread_out
    tokens, stored = q.shape[1], jax.tree.leaves(k)[0].shape[1]
    cu_q_lens, cu_kv_lens = jnp.clip(cu_q_lens, 0, tokens), jnp.clip(cu_kv_lens, 0, stored)
    if isinstance(v, KernelValues):  # each call's begin with a tile
        stored = v.tiles.shape[1] * reference.VALUE_TILE
        k = jnp.pad(k, ((0, 0), (0, stored - k.shape[1]), (0, 0), (0, 0)))
        v = KernelValues(v.tiles, size * stored)
    # Query tokens that no sequence of a mapped call owns become sequences without keys, such keys ones without queries.
    none = jnp.zeros_like(cu_q_lens[:, :1])
    cu_q_lens = jnp.concatenate([none, cu_q_lens[:, :1], cu_q_lens, none + tokens], axis=1)
    cu_kv_lens = jnp.concatenate([none, none, cu_kv_lens, cu_kv_lens[:, -1:]], axis=1)

    def joined(lens: jax.Array, each: int) -> jax.Array:
        starts = lens + jnp.arange(size, dtype=jnp.int32)[:, None] * each
        return jnp.append(starts.reshape(-1), jnp.int32(size * each))

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:])

    lens = joined(cu_q_lens, tokens), joined(cu_kv_lens, stored)
    q, k, v, carry = jax.tree.map(flat, (q, k, v, carry))
    return q, k, v, *lens, operands[_OPERANDS.index("scales")], carry


def _xla(call: _Call, q, k, v, cu_q_lens, cu_kv_lens, scales, carry):
    q_scale, k_scale, v_scale = scales
    if isinstance(v, KernelValues):
        v = reference.untile_values(v.tiles, k.shape[0])
    return reference.mla_prefill(
        q, k, v, cu_q_lens, cu_kv_lens, causal=call.causal, scale=call.scale, value_offset=call.value_offset,
        q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, carry=carry,
    )  # fmt: skip


def _core(call: _Call, *operands):
    """mla_prefill, with its rule for differentiation."""
    native, xla = functools.partial(_native, call), functools.partial(_xla, call)
    if call.differentiable:
        return xla(*operands)

    attend = functools.partial(dispatch.run, call.choices, call.named, native, xla)
    instead = "implementation='xla' can be differentiated"
    return dispatch.without_derivative("mla_prefill", instead, attend)(*operands)


_attend = jax.jit(_core, static_argnums=0)

_Keys = jax.Array | tuple[jax.Array, jax.Array]


def _checked_keys(k: Any, kind: str, num_heads: int) -> tuple[_Keys, int]:
    """k for queries of dtype `kind`, whole or as a pair, and its number of tokens."""
    if not isinstance(k, tuple | list):
        k = _checks.array("k", k)
        _checks.shape("k", k, ("S", num_heads, _checks.HEAD_DIM))
        _checks.dtype("k", k, (kind,))
        return k, k.shape[0]
    if len(k) != 2:
        raise ValueError(f"k is a tuple of {len(k)}; expected one array, or the pair (nope, k_pe)")
    if kind in _checks.FP8:
        raise ValueError(f"k is a pair beside q in {kind}; expected one array in fp8, as pack_kv_fp8 returns it")
    nope, k_pe = _checks.array("k[0] (nope)", k[0]), _checks.array("k[1] (k_pe)", k[1])
    if nope.ndim != 3 or nope.shape[1] != num_heads or nope.shape[2] not in (_checks.NOPE, 2 * _checks.NOPE):
        raise ValueError(
            f"k[0] (nope) has shape {list(nope.shape)}; expected [S, {num_heads}, {_checks.NOPE}], or the whole "
            f"up-projection [S, {num_heads}, {2 * _checks.NOPE}]"
        )
    stored = nope.shape[0]
    if k_pe.shape not in ((stored, _checks.ROPE), (stored, _checks.WIDTH)):
        raise ValueError(
            f"k[1] (k_pe) has shape {list(k_pe.shape)}; expected [{stored}, {_checks.ROPE}], or the gathered latent "
            f"rows [{stored}, {_checks.WIDTH}]"
        )
    _checks.dtype("k[0] (nope)", nope, (kind,))
    _checks.dtype("k[1] (k_pe)", k_pe, (kind,))
    return (nope, k_pe), stored


def _checked_values(
    v: jax.Array | KernelValues, kind: str, stored: int, num_heads: int, value_offset: int
) -> tuple[jax.Array | KernelValues, str]:
    """v for keys of dtype `kind`, and what the capability table calls it."""
    if isinstance(v, KernelValues):
        if kind != "float8_e4m3fn":
            raise ValueError(f"v is KernelValues beside q in {kind}; expected q and k in float8_e4m3fn")
        tiles = _checks.array("v.tiles", v.tiles)
        _checks.dtype("v.tiles", tiles, (kind,))
        expected = -(-stored // reference.VALUE_TILE), num_heads, _checks.NOPE, reference.VALUE_TILE
        _checks.shape("v.tiles", tiles, expected)
        if v.tokens != stored:
            raise ValueError(f"v has {v.tokens} tokens; expected k's {stored}")
        if value_offset != 0:
            raise ValueError(f"value_offset is {value_offset} for KernelValues; expected 0")
        return KernelValues(tiles, stored), KernelValues.KIND
    v = _checks.array("v", v)
    whole = v.ndim == 3 and v.shape[-1] == 2 * _checks.NOPE
    _checks.shape("v", v, (stored, num_heads, 2 * _checks.NOPE if whole else _checks.NOPE))
    if value_offset != (_checks.NOPE if whole else 0):
        raise ValueError(
            f"value_offset is {value_offset} for v of {v.shape[-1]} columns; expected 0 for 128, 128 for 256"
        )
    _checks.dtype("v", v, (kind, "bfloat16") if kind in _checks.FP8 else (kind,))
    return v, v.dtype.name


def mla_prefill(
    q: jax.Array,
    k: _Keys,
    v: jax.Array | KernelValues,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array,
    *,
    causal: bool,
    scale: float,
    value_offset: int = 0,
    q_scale: jax.Array | float | None = None,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    carry: tuple[jax.Array, jax.Array] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Ragged attention with keys of 192 and values of 128 columns.

    q [T, H, 192]. k [S, H, 192], or the pair (nope, k_pe), which needs no packing: nope parts [S, H, 128], or the whole
    up-projection [S, H, 256] whose first 128 columns are taken, beside the rope keys [S, 64] of all heads, or the
    gathered latent rows [S, 576] whose last 64 columns are. v [S, H, 128], or the whole up-projection [S, H, 256] with
    value_offset=128. Up-projections and latent rows are read in place; a pair gives the bits of `pack_kv`'s keys.

    All in one dtype: bf16, fp16, fp32, or, where k is no pair, fp8 with the fp32 scalars q_scale, k_scale, v_scale
    (None = 1). Beside fp8 q and k, v may be bf16, without a v_scale, which needs no packing; beside float8_e4m3fn,
    KernelValues, which Hopper takes fastest.

    cu_q_lens, cu_kv_lens [B + 1] int32: where each sequence begins and ends. causal: query i of n sees keys up to
    m - n + i of its m. scale: static (192 ** -0.5). carry: (out [T, H, 128], lse [T, H]) in fp32, into which the
    result is merged, in place where it is donated to jit; a row without keys keeps it as it is.

    implementation: None for the best, or a name, which serves the call or raises.

    Returns out [T, H, 128] in q's dtype (bf16 for fp8 queries; fp32 with a carry) and lse [T, H] fp32, natural. A row
    without keys has out 0 and lse -inf; one that sees a value which is not finite is NaN.

    Where a kernel takes whole keys alone (AMD's; `capabilities()` has it as key_parts), a pair is packed before.

    Raises ValueError or NotImplementedError while tracing, for wrong shapes, dtypes or head counts, and for a pair in
    fp8; also when differentiated, unless implementation is "xla", and for vmap over the scales.
    """
    q = _checks.array("q", q)
    _checks.dtype("q", q, (*_checks.FLOATS, *_checks.FP8))
    _checks.shape("q", q, ("T", "H", _checks.HEAD_DIM))
    tokens, num_heads, _ = q.shape
    _checks.num_heads("q", num_heads)
    kind = q.dtype.name
    k, stored = _checked_keys(k, kind, num_heads)
    v, v_kind = _checked_values(v, kind, stored, num_heads, value_offset)
    cu_q_lens = _checks.int32("cu_q_lens", cu_q_lens, ("B + 1",))
    if cu_q_lens.shape[0] < 1:
        raise ValueError("cu_q_lens is empty; expected [B + 1] elements")
    cu_kv_lens = _checks.int32("cu_kv_lens", cu_kv_lens, cu_q_lens.shape)
    scales = {}
    of_v = (v.tiles if isinstance(v, KernelValues) else v).dtype.name
    for name, scale_of, found in (("q_scale", q_scale, kind), ("k_scale", k_scale, kind), ("v_scale", v_scale, of_v)):
        if scale_of is not None and found not in _checks.FP8:
            raise ValueError(f"{name} is given for {found} inputs; it belongs to fp8")
        scales[name] = _checks.fp32_scalar(name, scale_of)
    if carry is not None:
        out, lse = (_checks.array(f"carry[{i}]", x) for i, x in enumerate(carry))
        _checks.dtype("carry[0] (out)", out, ("float32",))
        _checks.dtype("carry[1] (lse)", lse, ("float32",))
        _checks.shape("carry[0] (out)", out, (tokens, num_heads, _checks.NOPE))
        _checks.shape("carry[1] (lse)", lse, (tokens, num_heads))
        carry = (out, lse)
    scale, causal = _checks.number("scale", scale), _checks.flag("causal", causal)
    choices = dispatch.select(
        "mla_prefill", implementation=implementation, q_dtype=kind, cache_dtype=v_kind, scale=scale
    )
    if 0 in q.shape or stored == 0 or cu_q_lens.shape[0] == 1:
        choices = ()  # no query or no key: no kernel is handed a buffer without memory
    call = _Call(scale, causal, value_offset, choices, implementation is not None, implementation == dispatch.XLA)
    return _attend(call, q, k, v, cu_q_lens, cu_kv_lens, tuple(scales.values()), carry)
